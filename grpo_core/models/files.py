"""Finds and reads the files of a model, and decides what its architecture and size ask of torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import define, frozen

from grpo_core.contracts.errors import ConfigError, ModelError

PROCESSOR = Path("/proc/cpuinfo")
"""Lists what the processor can do, on Linux."""
_TEMPLATES = Path(__file__).parent / "chat_templates"
ADAPTERS = "adapter_config.json"
"""peft's file in every directory of adapters."""
WEIGHTS = "*.safetensors"
_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")


def local_directory(path: str, check: Callable[[str], None] | None = None) -> str:
    """Return the directory of a model; a hub id is downloaded once, into the hub's cache.

    Args:
        path: of the model.
        check: called with the directory of a hub id before its weights are downloaded.

    Raises ModelError if there is no model at ``path``, and what ``check`` raises.
    """
    check_path(path)
    directory = Path(os.path.expanduser(path))
    if directory.is_dir():
        return str(directory)
    if check is not None and directory_here(path) is None:
        check(_download(path, _PATTERNS))
    return _download(path, (*_PATTERNS, WEIGHTS))


def directory_here(path: str) -> Path | None:
    """Return the directory of a model path, or of a downloaded hub id, without network access."""
    directory = Path(os.path.expanduser(path))
    if directory.is_dir():
        return directory
    if path.count("/") != 1:
        return None
    from huggingface_hub import snapshot_download

    try:
        directory = Path(snapshot_download(path, allow_patterns=[*_PATTERNS, WEIGHTS], local_files_only=True))
    except Exception:  # it is missing or incomplete
        return None
    return directory if any(directory.glob(WEIGHTS)) else None


def check_path(path: str, hint: str = "") -> None:
    """Raise ModelError if ``path`` is neither a model's directory nor a possible hub id; no network access.

    Args:
        hint: end of the message; by default, a description of the path.
    """
    directory = Path(os.path.expanduser(path))
    if directory.is_dir():
        missing = [
            name for name in ("config.json", "tokenizer_config.json") if not (directory / name).exists()
        ]
        if not any(directory.glob(WEIGHTS)):
            missing.append(WEIGHTS)
        if missing:
            raise ModelError(
                f"model {path!r}: this directory holds no transformers model: there is no "
                + ", no ".join(missing)
            )
    elif directory.exists() or path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ModelError(
            f"model {path!r}: there is no such directory; expected a transformers model directory, a hub id "
            f'like "Qwen/Qwen3-0.6B", or "tiny".{hint or command_hint(path)}'
        )


def command_hint(argument: str) -> str:
    """Return a hint if another command accepts a refused argument, or an empty string."""
    path = Path(argument)
    if path.suffix == ".toml":
        return f" It looks like a configuration: use `grpo-core train {argument}`."
    if (path / "config.toml").is_file():
        return f" It is the directory of a run: use `grpo-core train --resume {argument}`."
    if runs := sorted(each.parent.name for each in path.glob("*/config.toml")):
        return f" It contains the runs {', '.join(runs)}."
    if path.suffix == ".py" and path.is_file():
        return f" It is Python: use `grpo-core train --env {argument}:NAME`."
    if ":" in argument:
        return f" It looks like an environment: use `grpo-core train --env {argument}`."
    return ""


def chat_template(name: str) -> str | None:
    """Return the text of a chat template; None if ``name`` is empty.

    Args:
        name: of a template that comes with grpo-core, or of a file.

    Raises ModelError if there is none.
    """
    if not name:
        return None
    bundled = {path.stem: path for path in sorted(_TEMPLATES.glob("*.jinja"))}
    path = bundled.get(name) or Path(os.path.expanduser(name))
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.chat_template is {name!r}, which cannot be read ({error}); expected a file, or one of "
            f"those that come with grpo-core: {', '.join(bundled)}"
        ) from error


def hub_cache(path: str) -> Path:
    """Return the directory of the hub's cache for a hub id; it may not exist."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE, f"models--{path.replace('/', '--')}")


def _download(repository: str, patterns: Sequence[str]) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # they would break the live view, which shows its own
    try:
        return str(snapshot_download(repository, allow_patterns=list(patterns)))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"model {repository!r}: no such directory here, and it cannot be loaded from the hub: {reason}"
        ) from error


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files that transformers loads, without copies in other formats.

    Without transformers' file names, these are all safetensors files of the directory.  Raises OSError if
    there are none, or if a file of the index is missing.
    """
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.exists():
        return [whole]
    if not index.exists():
        if files := sorted(directory.glob(WEIGHTS)):
            return files
        raise OSError("there are no *.safetensors files in it")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [directory / name for name in names]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise OSError(f"{index.name} does not name its files ({type(error).__name__})") from None
    for file in files:
        if not file.exists():
            raise OSError(f"{file.name} is missing, which {index.name} names: copy or download it again")
    return files


def text_files(directory: Path) -> set[Path]:
    """Return the files of a model without its weights: configuration, tokenizer, chat template."""
    return {
        path
        for pattern in _PATTERNS
        if pattern != "*.py"
        for path in directory.glob(pattern)
        if not path.name.endswith(".index.json")
    }


_EXPONENTS = {
    "F64": ("<u8", 0x7FF0 << 48),
    "F32": ("<u4", 0x7F80 << 16),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
"""Integer types of floating-point dtypes, and the exponent bits that infinity and NaN set."""
_AT_ONCE = 1 << 20
"""Number of words that are checked together."""


def not_finite(file: Path) -> str:
    """Return the name of a tensor with a non-finite number in a safetensors file, or ""."""
    import numpy as np

    try:
        header = header_of(file)
    except ValueError:  # the file is something else
        return ""
    content = np.memmap(file, np.uint8, "r")
    begin = 8 + int.from_bytes(content[:8].tobytes(), "little")
    for name, about in sorted(header.items()):
        if (kind := _EXPONENTS.get(about["dtype"])) is None:
            continue
        first, last = about["data_offsets"]
        words, bits = content[begin + first : begin + last].view(kind[0]), np.array(kind[1], kind[0])
        for start in range(0, len(words), _AT_ONCE):
            if ((words[start : start + _AT_ONCE] & bits) == bits).any():
                return name
    return ""


_SAMPLES, _SAMPLE = 64, 4096
"""Number of places that are read in a file, and bytes at each."""


def samples(path: Path, begin: int, size: int) -> list[bytes]:
    """Return the bytes at evenly spread places of a part of a file.  Raises OSError."""
    found = []
    with path.open("rb") as file:
        for place in (nth * size // _SAMPLES for nth in range(_SAMPLES)):
            file.seek(begin + place)
            found.append(file.read(min(_SAMPLE, size - place)))
    return found


def weights_digest(directory: Path) -> str:
    """Return a digest of a model's weight files: names, sizes, and bytes at 64 places of each.

    Training changes numbers everywhere, so other weights have another digest, and even a model of many GB
    takes no time.  Raises OSError.
    """
    digest = hashlib.sha256()
    for path in weight_files(directory):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        digest.update(b"".join(samples(path, 0, size)))
    return digest.hexdigest()


_LONGEST_HEADER = 100_000_000
"""Bytes of a header that safetensors accepts."""
UNKNOWN_SIZE = 2**31
"""Stands for a size that the model's configuration does not give."""


def computed_dtype(chosen: str, parameters: int = 0, *, on_gpu: bool) -> str:
    """Return the dtype of a model's matrix products: the ``chosen`` one, or what "auto" means here.

    ``parameters`` is the size of the model; 0 is a small one.
    """
    if chosen != "auto":
        return chosen
    # with AVX512-BF16, 135 million parameters train 1.4 times and decode 1.5 times as fast
    fast = parameters >= 50_000_000 and PROCESSOR.exists() and "avx512_bf16" in PROCESSOR.read_text()
    return "bfloat16" if on_gpu or fast else "float32"


def published_dtype(computed: str, engine: str) -> str:
    """Return the dtype of the weights that engines receive: the training engine's if that is narrower."""
    return engine if engine != "auto" and computed == "float32" else computed


def size_of(directory: str, name: str) -> int:
    """Return a size of a model by its name in config.json; ``UNKNOWN_SIZE`` if it is not given.

    Raises ModelError for a file that is not a configuration.
    """
    given = ModelFiles(Path(directory)).config.get(name)
    return given if isinstance(given, int) and given > 0 else UNKNOWN_SIZE


def header_of(path: Path) -> dict[str, Any]:
    """Return name, dtype and shape of the tensors in a safetensors file.  Raises ValueError, OSError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length < _LONGEST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return dict(header)


@frozen
class Tensor:
    """A tensor in a file of safetensors."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int


@define(slots=False)
class ModelFiles:
    """The files of a model's directory; one that is missing is empty."""

    directory: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """``config.json``, with the part about text."""
        config = self.table("config.json")
        text = config.get("text_config") or {}
        if not isinstance(text, Mapping):
            raise self.wrong(f"config.json: text_config is {type(text).__name__}; expected a table")
        return {**config, **text}

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors of the weights by name; empty if the files do not list them."""
        try:
            return {
                name: Tensor(path, tuple(map(int, each["shape"])), each["dtype"], *each["data_offsets"])
                for path in weight_files(self.directory)
                for name, each in header_of(path).items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    def table(self, name: str) -> Mapping[str, Any]:
        """Read a JSON file; raise ModelError if it is no table."""
        path = self.directory / name
        try:
            found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except (OSError, ValueError, RecursionError) as error:
            raise self.wrong(f"{name} cannot be read: {str(error)[:200]}") from None
        if not isinstance(found, dict):
            raise self.wrong(f"{name} is {type(found).__name__}; expected a table")
        return found

    def wrong(self, text: str) -> ModelError:
        """Return an error about these files, which are wrong input."""
        error = ModelError(f"model {str(self.directory)!r}: {text}")
        error.exit_status = ConfigError.exit_status
        return error


def keep_softcapping(model: Any) -> None:
    """Use transformers' plain attention for models with soft-capped scores (Gemma 2).

    Several releases choose a fused kernel instead, which ignores the capping.
    """
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
