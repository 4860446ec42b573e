"""How engines are told to serve a draft folder: for the report and for the model card. Free of torch."""

from __future__ import annotations

import json
import shlex
from typing import Literal

Layout = Literal["sglang", "vllm", "speculators"]
LAYOUTS: tuple[Layout, ...] = ("sglang", "vllm", "speculators")


def serving_commands(*, target: str, draft: str, draft_tokens: int, layout: str = "sglang") -> str:
    """A fenced block with the command of each engine that loads the layout.

    target, draft: hub ids or folders. draft_tokens: of a chain.
    """
    config = json.dumps({"method": "eagle3", "model": draft, "num_speculative_tokens": draft_tokens})
    target, draft = shlex.quote(target), shlex.quote(draft)
    vllm = [f"vllm serve {target} --speculative-config {shlex.quote(config)}"]
    if layout == "sglang":
        lines = [
            "# SGLang",
            f"python -m sglang.launch_server --model-path {target} \\",
            f"  --speculative-algorithm EAGLE3 --speculative-draft-model-path {draft} \\",
            f"  --speculative-num-steps {draft_tokens} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {draft_tokens + 1}",
            "",
            "# vLLM",
            *vllm,
        ]
    elif layout == "speculators":
        lines = ["# vLLM, which reads the target's name from the draft's config.json", f"vllm serve {draft}"]
        lines += ["", "# vLLM, the target under another name", *vllm]
    else:
        lines = ["# vLLM", *vllm]
    return "\n".join(["```sh", *lines, "```"])
