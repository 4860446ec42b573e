"""A tiny random target, prompts, and a draft trained on the target's own answers to them.

The target's weights are large, so that its answers vary instead of repeating one token; the draft is overfitted on
these very answers, so that rounds of every length occur.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.trainer.acceptance.decode import generate
from tasks.trainer.capture import capture_samples
from tasks.trainer.data.prepared import PreparedSample
from tasks.trainer.draft.alignment import count_rows
from tasks.trainer.draft.eagle3 import DraftConfig, Eagle3Draft
from tasks.trainer.draft.ttt import Computation, unroll
from tasks.trainer.target import Target
from tasks.trainer.train.batches import assemble

VOCAB, MAX_NEW_TOKENS, TTT_STEPS = 64, 32, 4


def make_target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Target(LlamaForCausalLM(config), None, name="tiny", aux_layer_ids=(0, 1, 2))


def make_draft(target: Target, *, seed: int = 0) -> Eagle3Draft:
    """Draft vocabulary: all ids but the last 8, so that d2t maps the ids that are left shifted by 8 from id 20 on."""
    chosen = torch.cat((torch.arange(20), torch.arange(28, VOCAB)))
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[chosen] = True
    config = DraftConfig(
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=64,
        vocab_size=len(chosen),
        target_vocab_size=VOCAB,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        aux_layer_ids=target.aux_layer_ids,
    )
    return Eagle3Draft.initialise(
        config,
        embedding=target.embedding,
        head=target.head,
        d2t=chosen - torch.arange(len(chosen)),
        t2d=t2d,
        seed=seed,
    )


@pytest.fixture(scope="session")
def target() -> Target:
    return make_target()


@pytest.fixture(scope="session")
def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in (1, 5, 17, 9)]


@pytest.fixture(scope="session")
def trained(target: Target, prompts: list[Tensor]) -> Eagle3Draft:
    draft = make_draft(target)
    documents, samples = [], []
    for prompt in prompts:
        answer = generate(target, prompt, max_new_tokens=MAX_NEW_TOKENS)
        documents.append(torch.cat((prompt, torch.tensor(answer))))
        ids = documents[-1].numpy().astype(np.int32)
        samples.append(PreparedSample("tiny", ids, np.arange(len(ids)) >= len(prompt)))
    batch = assemble(samples, capture_samples(target, samples))
    rows = count_rows(batch.loss_mask, batch.document_lengths, TTT_STEPS)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(150):
        unrolled = unroll(
            draft,
            batch,
            ttt_steps=TTT_STEPS,
            row_weight=[0.8**k / TTT_STEPS / int(n) for k, n in enumerate(rows)],
            head=target.head[draft.target_ids],
            draft_ids=draft.draft_ids(),
            computation=Computation(attention="fused", loss="linear"),
        )
        unrolled.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return draft


@pytest.fixture(scope="session")
def untrained(target: Target) -> Eagle3Draft:
    return make_draft(target)
