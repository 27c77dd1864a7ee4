import json
import os
from pathlib import Path
from types import SimpleNamespace

HERE = Path(os.environ["STAND_IN"])
SETTINGS = (
    "TRITON_F32_DEFAULT",
    "VLLM_WORKER_MULTIPROC_METHOD",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "PYTORCH_CUDA_ALLOC_CONF",
    "VLLM_BATCH_INVARIANT",
)


def called(name, *given):
    with (HERE / "calls").open("a") as calls:
        calls.write(json.dumps([name, *given]) + "\n")
    if faulty(name):
        raise RuntimeError(f"{name}: CUDA out of memory")


def faulty(name):
    fault = HERE / "fault"
    if not fault.exists() or fault.read_text() != name:
        return False
    fault.unlink()
    return True


class LLMEngine:
    def __init__(self):
        self.model_config = SimpleNamespace(
            architecture="Stand-in",
            dtype="float32",
            max_model_len=100,
            get_vocab_size=lambda: 100,
            get_head_size=lambda: 64,
        )
        self.engine_core = SimpleNamespace()  # it decodes in this process
        self.version = ""
        self.requests = {}

    @classmethod
    def from_engine_args(cls, engine_args):
        called("start", {**vars(engine_args)}, {key: os.environ.get(key) for key in SETTINGS})
        return cls()

    def collective_rpc(self, method, args=(), kwargs=None):
        called(method)
        return [""]

    def add_request(self, request_id, prompt, params, lora_request=None, priority=0):
        called("add_request")
        self.requests[request_id] = prompt, params

    def step(self):
        called("step")
        done, self.requests = self.requests, {}
        return [self._output(key, prompt, params) for key, (prompt, params) in done.items()]

    def _output(self, key, prompt, params):
        n = params.max_tokens
        completed = SimpleNamespace(
            token_ids=[7] * n,
            logprobs=SimpleNamespace(logprobs=[-0.5] * n),
            weight_versions=[SimpleNamespace(version=self.version, start=0, end=n)],
            finish_reason="error" if faulty("answer") else "length",
        )
        return SimpleNamespace(
            finished=True,
            request_id=key,
            outputs=[completed],
            prompt_token_ids=prompt["prompt_token_ids"],
            num_cached_tokens=0,
        )

    def abort_request(self, request_ids):
        called("abort_request")
        for key in request_ids:
            del self.requests[key]

    def add_lora(self, lora_request):
        called("add_lora")

    def set_weight_version(self, weight_version):
        called("set_weight_version")
        self.version = weight_version

    def reset_prefix_cache(self, reset_running_requests):
        called("reset_prefix_cache")

    def sleep(self, level, mode="abort"):
        called(f"sleep {level} {mode}")

    def wake_up(self, tags=None):
        called("wake_up" if tags is None else f"wake_up {tags[0]}")
