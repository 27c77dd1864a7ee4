"""The text of conversations: messages, chat templates, reasoning and tool calls."""
