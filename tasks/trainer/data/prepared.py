"""Prepared data: what a run trains on, exactly: token ids and loss mask, one sample a conversation.

Plain .npy arrays, memory-mapped: all samples end to end, cut apart by `offsets`. Nothing is decoded or copied on
opening, several processes share the pages, and any tool can read them; there is no compression (5 bytes a token, to
8 * D for the target's states). The receipt comes last and holds every file's checksum: a folder without it, or with
one that does not match, is refused, which costs one pass over the files at opening.

Where each sample is from lies beside them, a line a sample (samples.jsonl): file and place, domain, who answered, and
no text. Samples are written as they come, so that memory holds a few bytes for each, not its tokens.

Token files hold users' text as surely as the conversations do.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tasks.trainer.data.conversation import Conversation, Refusals
from tasks.trainer.data.mask import ChatRenderer, Supervise
from tasks.trainer.data.rendering import Rendered, render_all
from tasks.trainer.errors import InputError
from tasks.trainer.files import digest, read_json, sync_file, sync_folder, write_json

FORMAT = 1
RECEIPT = "receipt.json"
PROVENANCE = "samples.jsonl"
_ARRAYS = {
    "token_ids": np.dtype(np.int32),  # [sum of T]
    "loss_mask": np.dtype(np.bool_),  # [sum of T]
    "offsets": np.dtype(np.int64),  # [num_samples + 1]: sample i is offsets[i] : offsets[i + 1]
    "sample_ids": np.dtype("S32"),  # [num_samples]
}


@dataclass(frozen=True, slots=True)
class PreparedSample:
    """sample_id 32 hex characters; token_ids int32 [T]; loss_mask bool [T]. domain (conversation.py),
    where it is from and who answered: of a sample just made; prepared data keep them in samples.jsonl only."""

    sample_id: str
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    domain: str = ""
    where: str = ""
    answered_by: str | None = None


def sample_id(token_ids: npt.NDArray[np.int32], loss_mask: npt.NDArray[np.bool_]) -> str:
    """blake2b-128 over the ids (little-endian int32), then the mask (a byte a token); 32 hex characters.

    Both have the same length, so the bytes of one pair cannot read as another's.
    """
    assert token_ids.shape == loss_mask.shape
    state = hashlib.blake2b(np.ascontiguousarray(token_ids, dtype="<i4").tobytes(), digest_size=16)
    state.update(np.ascontiguousarray(loss_mask, dtype=np.bool_).tobytes())
    return state.hexdigest()


def prompt_id(conversation: Conversation) -> str:
    """32 hex characters of everything before the first answer: what stays when the answers are regenerated."""
    return hashlib.blake2b(conversation.prompt_identity.encode(), digest_size=16).hexdigest()


def is_held_out(conversation: Conversation, fraction: float) -> bool:
    """Whether it is among the about `fraction` of the prompts that are held out: its prompt's hash alone decides."""
    return int(prompt_id(conversation), 16) < fraction * 2.0**128


def split(conversations: Sequence[Conversation], fraction: float) -> tuple[list[Conversation], list[Conversation]]:
    """(training, held-out) conversations; each prompt's hash alone decides.

    So regenerated answers, more conversations or another order move nothing, and no prompt is on both sides.
    About `fraction` (0 <= fraction < 1) of the prompts are held out.

    Raises:
        InputError: one side is empty although `fraction` is not 0.
    """
    assert 0.0 <= fraction < 1.0
    sides: tuple[list[Conversation], list[Conversation]] = ([], [])
    for conversation in conversations:
        sides[int(is_held_out(conversation, fraction))].append(conversation)
    check_sides(len(sides[0]), len(sides[1]), fraction)
    return sides


def check_sides(num_training: int, num_heldout: int, fraction: float) -> None:
    """Raises InputError when one side is empty although `fraction` is not 0."""
    if fraction and not (num_training and num_heldout):
        side = "training" if num_heldout else "held-out"
        raise InputError(
            f"data.heldout_fraction={fraction} of {num_training + num_heldout} conversations leaves no {side} one: "
            "change it or give data.heldout_source"
        )


def make_samples(
    conversations: Iterable[Conversation],
    renderer: ChatRenderer,
    *,
    max_tokens: int | None = None,
    on_long: Literal["cut", "refuse"] = "cut",
    pack_tokens: int | None = None,
    long_documents: Literal["alone", "cut", "refuse"] = "alone",
    supervise: Supervise = "all",
    workers: int | Literal["auto"] = 1,
    refusals: Refusals,
) -> Iterator[PreparedSample]:
    """Render and cut; what does not become a sample, or is cut, is counted in `refusals` with its place.

    Reasons, besides the renderer's: `cut_too_long` and `cut_to_pack` (a sample, but its first tokens only), `too_long`
    and `longer_than_pack` (refused), `duplicate`, `nothing_supervised`, `no_supervised_left_after_cut`, and
    `fewer_than_two_supervised_in_a_row`: training predicts a supervised token from a supervised one, so such a sample
    has no row at any step.

    Args:
        max_tokens: on_long says what to do with longer ones. None: no limit.
        pack_tokens: long_documents says what to do with what is longer even so.
        supervise: all answers, or each conversation's last.
        workers: processes that render (rendering.py).
        refusals: receives the counts, and the supervised tokens that cutting lost.
    """
    seen: set[str] = set()
    rendered = render_all(renderer, conversations, supervise=supervise, workers=workers)
    for conversation, token_ids, loss_mask in _rows(rendered, refusals):
        length, cut, reason = len(token_ids), None, None
        if max_tokens is not None and length > max_tokens:
            length, cut = max_tokens, "cut_too_long"
            reason = "too_long" if on_long == "refuse" else None
        if pack_tokens is not None and length > pack_tokens and long_documents != "alone":
            length, cut = pack_tokens, "cut_to_pack"
            reason = reason or ("longer_than_pack" if long_documents == "refuse" else None)
        supervised = int(loss_mask.sum())
        if reason is None and not supervised:
            reason = "nothing_supervised"
        elif reason is None:
            token_ids, loss_mask = token_ids[:length], loss_mask[:length]
            if not loss_mask.any():
                reason = "no_supervised_left_after_cut"
            elif not (loss_mask[:-1] & loss_mask[1:]).any():
                reason = "fewer_than_two_supervised_in_a_row"
        identity = sample_id(token_ids, loss_mask)
        if reason is None and identity in seen:
            reason = "duplicate"
        if reason is not None:
            refusals.add(reason, conversation.where)
            continue
        if cut is not None:
            refusals.add(cut, conversation.where)
            refusals.supervised_cut += supervised - int(loss_mask.sum())
        seen.add(identity)
        yield PreparedSample(
            identity, token_ids, loss_mask, conversation.domain, conversation.where, conversation.answered_by
        )


def _rows(
    rendered: Iterable[Rendered], refusals: Refusals
) -> Iterator[tuple[Conversation, npt.NDArray[np.int32], npt.NDArray[np.bool_]]]:
    """The rows of each conversation; what has none is counted."""
    for conversation, rows in rendered:
        if isinstance(rows, str):
            refusals.add(rows, conversation.where)
            continue
        if not rows:  # its template rewrites history, and there is no answer
            refusals.add("nothing_supervised", conversation.where)
        for token_ids, loss_mask in rows:
            yield conversation, token_ids, loss_mask


class PreparedData(Sequence[PreparedSample]):
    """The samples of one folder, in their order, memory-mapped read-only.

    num_tokens, num_supervised; lengths int64 [n]; data_hash: 32 hex characters of the sample ids in order; refusals:
    what was refused or cut on the way here.
    """

    def __init__(self, arrays: dict[str, npt.NDArray[Any]], receipt: dict[str, Any]) -> None:
        self._token_ids = arrays["token_ids"]
        self._loss_mask = arrays["loss_mask"]
        self._offsets = arrays["offsets"]
        self._sample_ids = arrays["sample_ids"]
        self.num_tokens = int(receipt["num_tokens"])
        self.num_supervised = int(receipt["num_supervised"])
        self.data_hash = str(receipt["data_hash"])
        self.refusals = Refusals(**receipt["refusals"])
        self.lengths: npt.NDArray[np.int64] = np.diff(self._offsets)

    @classmethod
    def write(
        cls, folder: str | Path, samples: Iterable[PreparedSample], refusals: Refusals | None = None
    ) -> PreparedData:
        """Write the samples into `folder`, replacing what is there, and open it.

        `refusals` are kept in the receipt; read after the last sample, so the ones `make_samples` fills will do.

        Raises:
            InputError: there is no sample, or the folder cannot be made.
        """
        folder, refusals = Path(folder), refusals or Refusals()
        stream = iter(samples)
        first = next(stream, None)
        if first is None:
            raise InputError(f"no conversation leaves a sample for {folder.name}; refused: {refusals.summary()}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RECEIPT).unlink(missing_ok=True)  # from here on the folder is incomplete, until the last line
        except OSError as exc:
            raise InputError(f"{folder} cannot be written: {exc.strerror}; choose another run_dir") from None
        lengths, identities, num_supervised = [0], [], 0
        bodies = {name: folder / f".{name}.part" for name in ("token_ids", "loss_mask")}
        with (
            bodies["token_ids"].open("wb") as ids,
            bodies["loss_mask"].open("wb") as masks,
            (folder / f".{PROVENANCE}").open("w", encoding="utf-8") as provenance,
        ):
            for sample in itertools.chain((first,), stream):
                ids.write(np.ascontiguousarray(sample.token_ids, dtype=_ARRAYS["token_ids"]).data)
                masks.write(np.ascontiguousarray(sample.loss_mask, dtype=_ARRAYS["loss_mask"]).data)
                lengths.append(len(sample.token_ids))
                identities.append(sample.sample_id.encode())
                num_supervised += int(sample.loss_mask.sum())
                answers = json.loads(sample.answered_by) if sample.answered_by else None
                told = {"sample_id": sample.sample_id, "from": sample.where, "domain": sample.domain}
                provenance.write(json.dumps(told | {"answers": answers}) + "\n")
        offsets = np.cumsum(lengths, dtype=np.int64)
        sample_ids = np.array(identities, dtype="S32")
        small: dict[str, npt.NDArray[Any]] = {"offsets": offsets, "sample_ids": sample_ids}
        checksums = {}
        for name, dtype in _ARRAYS.items():
            path = folder / f"{name}.npy"
            scratch = folder / f".{name}.npy"
            with scratch.open("wb") as file:
                if name in small:
                    np.save(file, small[name].astype(dtype, copy=False), allow_pickle=False)
                else:
                    # The header says how long the array is, which is known only now.
                    header = {"descr": dtype.str, "fortran_order": False, "shape": (int(offsets[-1]),)}
                    np.lib.format.write_array_header_1_0(file, header)
                    with bodies[name].open("rb") as body:
                        shutil.copyfileobj(body, file, 1 << 20)
            sync_file(scratch)
            scratch.replace(path)
            checksums[name] = digest(path)
        sync_file(folder / f".{PROVENANCE}")
        (folder / f".{PROVENANCE}").replace(folder / PROVENANCE)
        for path in bodies.values():
            path.unlink()
        sync_folder(folder)
        receipt = {
            "format": FORMAT,
            "num_samples": len(identities),
            "num_tokens": int(offsets[-1]),
            "num_supervised": num_supervised,
            "data_hash": _data_hash(sample_ids),
            "checksums": checksums,
            "refusals": asdict(refusals),
        }
        write_json(folder / RECEIPT, receipt)
        return cls.open(folder)

    @classmethod
    def open(cls, folder: str | Path) -> PreparedData:
        """Open what `write` finished.

        Raises:
            InputError: no receipt (the writer was stopped), another format, a file that is missing or altered.
        """
        folder = Path(folder)
        again = "run the prepare stage again"
        try:
            receipt = read_json(folder / RECEIPT)
        except FileNotFoundError:
            raise InputError(f"{folder} holds no complete prepared data (no {RECEIPT}): {again}") from None
        except json.JSONDecodeError:
            raise InputError(f"{folder / RECEIPT} is damaged: {again}") from None
        if not isinstance(receipt, dict) or receipt.get("format") != FORMAT:
            raise InputError(f"{folder / RECEIPT} is not of format {FORMAT}: {again}")
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name in _ARRAYS:
            path = folder / f"{name}.npy"
            if not path.is_file():
                raise InputError(f"{path} is missing: {again}")
            if digest(path) != receipt["checksums"][name]:
                raise InputError(f"{path} does not match its receipt: {again}")
            arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
        return cls(arrays, receipt)

    def __len__(self) -> int:
        return len(self._sample_ids)

    def __getitem__(self, index: int) -> PreparedSample:  # type: ignore[override]  # a slice has no use here
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        start, stop = int(self._offsets[index]), int(self._offsets[index + 1])
        return PreparedSample(
            self._sample_ids[index].decode(), self._token_ids[start:stop], self._loss_mask[start:stop]
        )

    def count_supervised(self, vocab_size: int, *, every: bool = False) -> npt.NDArray[np.int64]:
        """How often each token id is supervised, int64 [vocab_size]. every: how often it occurs at all.

        Raises:
            InputError: a token id outside the target's vocabulary: tokenizer and model do not belong together.
        """
        counts = np.zeros(vocab_size, dtype=np.int64)
        for start in range(0, self.num_tokens, 1 << 22):  # 16 MiB of ids at a time
            ids = self._token_ids[start : start + (1 << 22)]
            if int(ids.max()) >= vocab_size:
                raise InputError(
                    f"token id {int(ids.max())} is outside the target's vocabulary of {vocab_size}: the tokenizer is "
                    "not this model's"
                )
            counted = ids if every else ids[self._loss_mask[start : start + (1 << 22)]]
            counts += np.bincount(counted, minlength=vocab_size)
        return counts


def _data_hash(sample_ids: npt.NDArray[np.bytes_]) -> str:
    return hashlib.blake2b(sample_ids.tobytes(), digest_size=16).hexdigest()
