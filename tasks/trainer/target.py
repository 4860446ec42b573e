"""The frozen target: capture of its hidden states, and decoding with a cache.

A forward is one unpadded document, or several that are kept apart exactly (target_packed.py): on a GPU, where short
documents alone would leave it idle. Padding would change states and cost time; that packing changes a third of the
bfloat16 values by their last bit is why a CPU and `train.deterministic` do without it: there, online and offline runs
train on the same numbers.

States are rounded to bfloat16 here, in one place, whether they go to a store or straight to the draft.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from tasks.trainer.config import Target as TargetChoice
from tasks.trainer.errors import InputError
from tasks.trainer.target_files import resolve, unpacked
from tasks.trainer.target_packed import documents_apart, positions, why_not
from tasks.trainer.target_text import check_aux_layer_ids, default_aux_layer_ids, files_dtype, load_text

logger = logging.getLogger(__name__)
# Its bars count the tensors of a checkpoint, for each stage anew; ours count what the user waits for.
transformers_logging.disable_progress_bar()

# Rows projected through the head at once: 512 x 151,936 fp32 logits are 311 MB.
HEAD_CHUNK_ROWS = 512
# A model that changes its logits after the head would make `head(last_hidden)` a wrong soft target.
_LOGIT_CHANGES = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}


@dataclass(frozen=True, slots=True)
class TargetStates:
    """What the draft learns from one document of T tokens, R of them target rows (draft/alignment.py).

    aux_hidden bfloat16 [T, 3D]: outputs of three decoder layers, low to high. Of the target rows: target_argmax int32
    [R] and target_lse float32 [R] over the target's full vocabulary, and the distribution itself, one of last_hidden
    bfloat16 [R, D], after the final norm, and top_k.
    """

    aux_hidden: Tensor
    target_argmax: Tensor
    target_lse: Tensor
    last_hidden: Tensor | None = None
    top_k: TopTokens | None = None


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The k most probable tokens of R rows: ids int32 [R, k] of the target's vocabulary, each once a row;
    log_probabilities float32 [R, k] over its full vocabulary."""

    ids: Tensor
    log_probabilities: Tensor

    def split(self, num_rows: Sequence[int]) -> list[TopTokens]:
        """The same rows in parts of so many."""
        sizes = list(num_rows)
        return list(map(TopTokens, self.ids.split(sizes), self.log_probabilities.split(sizes)))


@dataclass(frozen=True, slots=True)
class Document:
    """What the target reads: token_ids int64 [T], and the rows int64 [R] that are soft targets, ascending."""

    token_ids: Tensor
    target_rows: Tensor
    sample_id: str
    """For errors."""


class Capturing(Protocol):
    """What captures states: a Target, or one that is spread over ranks (target_shared.py)."""

    packs: bool

    def capture(self, documents: Sequence[Document], *, top_k: int | None = None) -> list[TargetStates]:
        """See Target.capture."""
        ...


class Target:
    """A decoder-only model of transformers, frozen, in eval mode.

    name: what the user wrote; hidden_size D; vocab_size V; num_layers L; aux_layer_ids; eos_token_ids: every id that
    ends a turn; dtype: the type it computes in; fingerprint: see target_text; packs: whether documents share forwards.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        aux_layer_ids: Sequence[int] | None = None,
        eos_token_ids: Sequence[int] = (),
        fingerprint: str = "",
        pack_documents: bool = False,
    ) -> None:
        """pack_documents: let documents share forwards, if the model keeps them apart; what does not is logged."""
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.fingerprint = fingerprint
        config = model.config.get_text_config()
        for attribute, harmless in _LOGIT_CHANGES.items():
            value = getattr(config, attribute, harmless)
            if value not in (None, harmless):
                raise InputError(
                    f"target {name!r} has {attribute}={value}: its logits are not head(last_hidden), which Eyas "
                    "trains on; such targets are not supported"
                )
        self.config = config
        self.hidden_size = int(config.hidden_size)
        self.num_layers = int(config.num_hidden_layers)
        self.aux_layer_ids = (
            default_aux_layer_ids(self.num_layers)
            if aux_layer_ids is None
            else check_aux_layer_ids(aux_layer_ids, self.num_layers)
        )
        self.embedding: Tensor = model.get_input_embeddings().weight
        # Of a target that is spread over ranks (target_shared.py) the embedding stays so; the head is read here.
        self.head: Tensor = whole_tensor(model.get_output_embeddings().weight)
        # The head's rows: some checkpoints pad them past the tokenizer's ids.
        self.vocab_size = int(self.head.shape[0])
        if getattr(model.get_output_embeddings(), "bias", None) is not None:
            raise InputError(f"target {name!r} has a bias on its head, which draft checkpoints cannot carry")
        self.device = self.head.device
        self.dtype = self.head.dtype
        self.eos_token_ids = tuple(eos_token_ids)
        # After a prefill transformers hands the head a strided view [B, 1, D] of the last rows. torch's CPU matmul then
        # copies the whole head once a batch row: 14 s for 96 prompts and a 28M head, against 0.1 s.
        model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))
        # transformers 5.24 renames the argument and warns of the old name.
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._decoder: nn.Module = model.get_decoder()
        self._layers = decoder_layers(self._decoder, self.num_layers, name)
        self.packs = pack_documents
        if pack_documents and (
            reason := why_not(self._decoder, config, vocab_size=self.vocab_size, device=self.device)
        ):
            logger.warning("target %s: one document a forward, for %s", name, reason)
            self.packs = False

    @classmethod
    def load(
        cls,
        model: str,
        *,
        dtype: str = "auto",
        compute_dtype: str = "auto",
        aux_layer_ids: Sequence[int] | None = None,
        chat_template: str | None = None,
        revision: str | None = None,
        device: str = "cpu",
        pack_documents: bool = False,
        over_ranks: int = 1,
    ) -> Target:
        """Load a target: folder, .gguf, package:// file or hub id (see target_files.resolve).

        dtype: the weights' type (`auto`: see pick_dtype). compute_dtype: `auto` is the same; `float32` computes with
        the same, already rounded, weights in float32. over_ranks: spread the weights over so many ranks, which are all
        and load it together. Raises InputError for anything that is wrong with the model.
        """
        files = resolve(model, revision=revision)
        torch_dtype = files_dtype(files, dtype, device)
        folder = unpacked(files, str(torch_dtype).removeprefix("torch."))
        arguments: dict[str, Any] = {"dtype": torch_dtype, "use_safetensors": True, "attn_implementation": "sdpa"}
        if over_ranks == 1:
            loaded = AutoModelForCausalLM.from_pretrained(folder, device_map=None, **arguments)
        else:
            from tasks.trainer.target_shared import own_gpu_is_first, parallel_arguments

            with own_gpu_is_first():
                loaded = AutoModelForCausalLM.from_pretrained(folder, **arguments, **parallel_arguments(over_ranks))
        if compute_dtype != "auto":
            loaded = loaded.to(getattr(torch, compute_dtype))
        text = load_text(
            model,
            dtype=dtype,
            aux_layer_ids=aux_layer_ids,
            chat_template=chat_template,
            revision=revision,
            device=device,
        )
        return cls(
            loaded.to(device),
            text.tokenizer,
            name=model,
            aux_layer_ids=text.aux_layer_ids,
            eos_token_ids=text.eos_token_ids,
            fingerprint=text.fingerprint,
            pack_documents=pack_documents,
        )

    @classmethod
    def of(
        cls,
        chosen: TargetChoice,
        *,
        device: str,
        compute_dtype: str = "auto",
        deterministic: bool = False,
        over_ranks: int = 1,
    ) -> Target:
        """`load` as a run's config says. deterministic: pack_documents "auto" is never."""
        packs = chosen.pack_documents == "always" or (
            chosen.pack_documents == "auto" and device.startswith("cuda") and not deterministic
        )
        return cls.load(
            chosen.model,
            dtype=chosen.dtype,
            compute_dtype=compute_dtype,
            aux_layer_ids=chosen.aux_layer_ids,
            chat_template=chosen.chat_template,
            revision=chosen.revision,
            device=device,
            pack_documents=packs and over_ranks == 1,
            over_ranks=over_ranks,
        )

    def capture(self, documents: Sequence[Document], *, top_k: int | None = None) -> list[TargetStates]:
        """The states of each document, in one forward where this target `packs`, else in one each.

        Only target rows go through the head. top_k: keep that many tokens of each in place of last_hidden. Raises
        InputError with the sample's id on NaN or Inf.
        """
        if self.packs and len(documents) > 1:
            return self._capture(documents, top_k=top_k)
        return [states for document in documents for states in self._capture([document], top_k=top_k)]

    @torch.no_grad()
    def _capture(self, documents: Sequence[Document], *, top_k: int | None) -> list[TargetStates]:
        """One forward."""
        lengths = [len(document.token_ids) for document in documents]
        first_rows = itertools.accumulate(lengths[:-1], initial=0)
        token_ids = torch.cat([document.token_ids for document in documents])[None].to(self.device)
        rows = torch.cat([one.target_rows + first for one, first in zip(documents, first_rows, strict=True)])
        with self._collect() as collected:
            if len(documents) == 1:
                output = self._decoder(input_ids=token_ids, use_cache=False)
            else:
                places = positions(lengths).to(self.device)
                with documents_apart(self.config, lengths):
                    output = self._decoder(input_ids=token_ids, position_ids=places, use_cache=False)
        aux_hidden = torch.cat([collected[layer][0] for layer in self.aux_layer_ids], dim=-1).to(torch.bfloat16)
        last_hidden = output.last_hidden_state[0][rows.to(self.device)].to(torch.bfloat16)
        argmax, lse, top = head_statistics(last_hidden.to(self.dtype), self.head, top_k=top_k)
        num_rows = [len(document.target_rows) for document in documents]
        found = zip(
            documents, aux_hidden.split(lengths), last_hidden.split(num_rows), argmax.split(num_rows),
            lse.split(num_rows), top.split(num_rows) if top else [None] * len(documents), strict=True,
        )  # fmt: skip
        states = [TargetStates(aux, best, lse, None if top else last, top) for _, aux, last, best, lse, top in found]
        # One wait for the device a forward, unless there is something to name.
        if not (torch.isfinite(aux_hidden).all() & torch.isfinite(last_hidden).all()):
            lasts = last_hidden.split(num_rows)
            for document, aux, last in zip(documents, aux_hidden.split(lengths), lasts, strict=True):
                for name, values in (("auxiliary hidden states", aux), ("last hidden state", last)):
                    if not torch.isfinite(values).all():
                        raise InputError(
                            f"sample {document.sample_id}: the target's {name} hold NaN or Inf in {self.dtype}; try "
                            "another target.dtype, or remove the sample"
                        )
        return states

    @torch.no_grad()
    def forward(self, token_ids: Tensor, cache: DynamicCache) -> tuple[Tensor, Tensor]:
        """Decode n more tokens, int64 [1, n], appending to `cache`. Returns logits [n, V], aux_hidden [n, 3D]."""
        with self._collect() as collected:
            output = self.model(input_ids=token_ids.to(self.device), use_cache=True, **{self._cache_argument: cache})
        aux_hidden = torch.cat([collected[layer][0] for layer in self.aux_layer_ids], dim=-1)
        return output.logits[0], aux_hidden

    @torch.no_grad()
    def prefill(self, token_ids: Tensor, cache: DynamicCache, *, last: int = 1) -> tuple[Tensor, Tensor]:
        """The forward over one text, int64 [1, P]. Returns logits [last, V] of its last tokens, aux_hidden [P, 3D].

        The head runs on these tokens alone: a long prompt's logits are larger than its cache.
        """
        last_hidden, aux_hidden = self._decode(token_ids, cache)
        logits: Tensor = self.model.get_output_embeddings()(last_hidden[0, -last:])
        return logits, aux_hidden[0]

    @torch.no_grad()
    def forward_rows(
        self, token_ids: Tensor, cache: DynamicCache, *, position_ids: Tensor, attention_mask: Any
    ) -> tuple[Tensor, Tensor]:
        """Decode n more tokens of each of B sequences, with positions and a mask of the caller's.

        token_ids, position_ids int64 [B, n]; attention_mask [B, 1, n, W], added to the scores, or one by layer type.
        Returns logits [B, n, V], aux_hidden [B, n, 3D].
        """
        last, aux_hidden = self._decode(token_ids, cache, position_ids=position_ids, attention_mask=attention_mask)
        logits: Tensor = self.model.get_output_embeddings()(last)
        return logits, aux_hidden

    def _decode(self, token_ids: Tensor, cache: DynamicCache, **arguments: Any) -> tuple[Tensor, Tensor]:
        """last_hidden [B, n, D] and aux_hidden [B, n, 3D] of a forward that appends to `cache`."""
        with self._collect() as collected:
            output = self._decoder(
                input_ids=token_ids.to(self.device), use_cache=True, **{self._cache_argument: cache}, **arguments
            )
        aux_hidden = torch.cat([collected[layer] for layer in self.aux_layer_ids], dim=-1)
        return output.last_hidden_state, aux_hidden

    @contextmanager
    def _collect(self) -> Iterator[dict[int, Tensor]]:
        """The outputs [1, n, D] of the auxiliary layers of one forward, by layer."""
        collected: dict[int, Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                collected[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [self._layers[layer].register_forward_hook(keep(layer)) for layer in self.aux_layer_ids]
        try:
            yield collected
        finally:
            for handle in handles:
                handle.remove()


def head_statistics(
    last_hidden: Tensor, head: Tensor, *, top_k: int | None = None
) -> tuple[Tensor, Tensor, TopTokens | None]:
    """Argmax int32 [R] and log-sum-exp float32 [R] of head(last_hidden) over the full vocabulary, in chunks of rows,
    and the top_k most probable tokens if asked for.

    last_hidden [R, D], head [V, D] in the target's dtype: the logits are rounded as the served target rounds them.
    """
    argmax, lse, ids, log_probabilities = [], [], [], []
    for rows in last_hidden.split(HEAD_CHUNK_ROWS):
        logits = (rows @ head.T).float()
        # Of equal logits the first index. In place: on the CPU each pass over [rows, V] counts.
        maximum, index = logits.max(-1)
        argmax.append(index.to(torch.int32))
        if top_k is not None:
            values, tokens = logits.topk(min(top_k, head.shape[0]), dim=-1)
            ids.append(tokens.to(torch.int32))
        lse.append(maximum + logits.sub_(maximum[:, None]).exp_().sum(-1).log_())
        if top_k is not None:
            log_probabilities.append(values - lse[-1][:, None])
    top = None if top_k is None else TopTokens(torch.cat(ids), torch.cat(log_probabilities))
    return torch.cat(argmax), torch.cat(lse), top


def whole_tensor(weight: Tensor) -> Tensor:
    """A weight that may be spread over the ranks, whole on each."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def decoder_layers(decoder: nn.Module, num_layers: int, name: str) -> nn.ModuleList:
    """The list of the decoder's layers. Raises InputError when there is none of that length."""
    lists = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if not lists:
        raise InputError(f"target {name!r}: found no list of {num_layers} decoder layers in {type(decoder).__name__}")
    return lists[0]
