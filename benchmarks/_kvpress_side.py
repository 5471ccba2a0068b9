"""kvpress's side of `rivals.py`, in an environment of its own: it needs an older transformers.

Imports nothing of this project, reads a JSON file, and writes a JSON line for each text. These
presses take keys and values away after a layer has read the whole text, so they see what the dense
model computes: one prefill serves all of them at all shares, and caches of one size are rows of a
batch. `shipped` is kvpress as its users run it: for speed and memory.
"""
# R rows (presses at shares), G KV heads, S keys, D head size, T tokens, N places

import contextlib
import ctypes
import json
import re
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import kvpress
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

Pairs = list[tuple[Tensor, ...]]  # of each layer: keys and values (1, G, S, D)
Seen = list[tuple[Tensor, ...]]  # of each layer: hidden states, and rotary cos and sin
HIDES = "KVzipPress"  # single heads' keys, and frees none


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    torch.set_num_threads(job["threads"])
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.float32, trust_remote_code=False
    ).eval()
    model(torch.tensor([job["texts"][0]["ids"][:64]]))  # weights are read from the disk
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb  # as a press does
    for number, text in enumerate(job["texts"]):
        side = Side(model, text, job["more"])
        found = [side.shipped(press) for press in text.get("shipped", ())] or side.answers()
        print(json.dumps([number, found]), flush=True)


class Side:
    def __init__(self, model: Any, text: dict[str, Any], more: int) -> None:
        self.model, self.text, self.more = model, text, more
        self.layers = [layer.self_attn for layer in model.model.layers]
        self.cache: Any = DynamicCache()
        self.scores: dict[Any, Tensor] = {}
        ends = model.generation_config.eos_token_id
        self.ends = torch.tensor(ends if isinstance(ends, list) else [ends])

    def answers(self) -> list[dict[str, Any]]:
        """Of each side, a press with its share, tokens and KV bytes that are allocated for each
        question."""
        ids, sides = self.text["ids"], self.text["sides"]
        found: list[dict[str, Any]] = [{"tokens": [], "allocated_bytes": []} for _ in sides]
        # Read once: what presses see of a text does not depend on its questions, unless they know
        # them.
        unknown = self.read(ids)
        for question in self.text["questions"]:
            for is_known in (False, True):
                seen, scores, asked = unknown, self.scores, question["ids"] if is_known else []
                numbers = [n for n, side in enumerate(sides) if side["known"] == is_known]
                if not numbers:
                    continue
                if is_known:
                    both = zip(seen, self.read(asked), strict=True)
                    seen = [tuple(torch.cat(x, 1) for x in zip(*two, strict=True)) for two in both]
                    scores = {}
                # Batches need no padding: a mask would make copies of all keys for each token.
                batches: dict[Any, list[Any]] = defaultdict(list)
                for number in numbers:
                    side, keep = sides[number], keep_of(sides[number], self.text, question)
                    if side["name"] == HIDES:
                        dense = [(layer.keys, layer.values) for layer in self.cache.layers]
                        batches[HIDES].append((number, dense, self.hide(keep)))
                    else:
                        pairs = self.compress(side["name"], keep, seen, scores)
                        batches[keep].append((number, pairs, None))
                crop(self.cache, len(ids))
                tail, start = tail_of(question, is_known), len(ids) + len(asked)
                for batch in batches.values():
                    which, rows, hidden = zip(*batch, strict=True)
                    answers = self.decode(rows, hidden, start, tail, question["answer_ids"])
                    for number, tokens, size in zip(which, *answers, strict=True):
                        found[number]["tokens"].append(tokens)
                        found[number]["allocated_bytes"].append(size)
        return found

    def read(self, ids: list[int]) -> Seen:
        seen: Seen = []

        def note(module: Any, inputs: Any, named: dict[str, Any], output: Any) -> None:
            seen.append((named["hidden_states"], *named["position_embeddings"]))

        hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in self.layers]
        self.model.model(input_ids=torch.tensor([ids]), past_key_values=self.cache)
        for hook in hooks:
            hook.remove()
        return seen

    def compress(self, name: str, keep: int, seen: Seen, scores: dict[Any, Tensor]) -> Pairs:
        press = getattr(kvpress, name)()
        compute, pairs = press.score, []

        def score(module: Any, *others: Any) -> Tensor:
            if (key := (name, module.layer_idx)) not in scores:
                scores[key] = compute(module, *others)
            return scores[key]

        # One computation of scores serves all shares; only which of them are kept differs.
        if name != "StreamingLLMPress":  # the others' scores do not depend on what is kept
            press.score = score
        for module, held, (states, *turn) in zip(self.layers, self.cache.layers, seen, strict=True):
            press.compression_ratio = ratio(keep, states.shape[1])
            rotary = {"position_embeddings": turn}
            pairs.append(press.compress(module, states, held.keys, held.values, None, rotary))
        return pairs

    def hide(self, keep: int) -> list[tuple[Tensor, ...]]:
        """Of each layer, which keys of which heads KVzip hides."""
        press = kvpress.KVzipPress(compression_ratio=ratio(keep, len(self.text["ids"])))
        if HIDES not in self.scores:
            press.compress_post = lambda model: self.scores.update({HIDES: press.score_val})
            with press(self.model):  # on leaving, it reads the text again
                press._context_ids, press._cache = torch.tensor([self.text["ids"]]), self.cache
            del press.compress_post
        press.score_val = self.scores[HIDES].clone()
        press.compress_post(self.model)
        found = [layer.masked_key_indices for layer in self.layers]
        self.unhide()
        return found

    def decode(
        self, rows: Any, hidden: Any, start: int, tail: list[int], expected: list[int]
    ) -> tuple[list[list[int]], list[int]]:
        """Tokens of each row, and bytes allocated at the end of the prompt."""
        cache: Any = DynamicCache()
        for number, pairs in enumerate(zip(*rows, strict=True)):
            cache.update(*map(torch.cat, zip(*pairs, strict=True)), number)
            if hidden[0] is not None:
                parts = [layers[number][1:] for layers in hidden]  # heads and places
                parts = [(torch.full_like(p[0], row), *p) for row, p in enumerate(parts)]
                masked = tuple(map(torch.cat, zip(*parts, strict=True)))
                self.layers[number].masked_key_indices = masked

        def forward(ids_RT: Tensor, first: int, num_logits: int) -> Tensor:
            places_RT = torch.arange(first, first + ids_RT.shape[1]).expand(len(rows), -1)
            found = self.model(
                ids_RT, past_key_values=cache, position_ids=places_RT, logits_to_keep=num_logits
            )
            return found.logits.argmax(-1)

        def is_right(tokens_RN: Tensor) -> Tensor:
            if tokens_RN.shape[1] < len(expected):
                return torch.zeros(len(rows), dtype=torch.bool)
            return (tokens_RN[:, : len(expected)] == torch.tensor(expected)).all(1)

        # With the right answer behind the prompt: rows that agree need no more. Not where keys are
        # hidden by one that is orthogonal to all queries: for more of them there may be none.
        draft = expected[:-1] if hidden[0] is None else []
        ids_RT = torch.tensor([tail + draft]).expand(len(rows), -1)
        best_RN = forward(ids_RT, start, 1 + len(draft))
        crop(cache, cache.get_seq_length() - len(draft))
        for layer in cache.layers:  # not as views, which keep the draft alive: no press has one
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        tensors = [x for layer in cache.layers for x in (layer.keys, layer.values)]
        held = sum(x.untyped_storage().nbytes() for x in tensors) // len(rows)
        right_R, tokens_RN = is_right(best_RN), best_RN[:, :1]
        while (count := tokens_RN.shape[1]) < len(expected) + self.more:
            if (right_R | torch.isin(tokens_RN, self.ends).any(1)).all():
                break
            new_R1 = forward(tokens_RN[:, -1:], start + len(tail) + count - 1, 1)
            tokens_RN = torch.cat([tokens_RN, new_R1], 1)
            right_R |= is_right(tokens_RN)
        self.unhide()
        found = []
        for right, tokens_N in zip(right_R, tokens_RN, strict=True):
            end = torch.isin(tokens_N, self.ends).nonzero()[:1].flatten().tolist()
            found.append(expected if right else tokens_N[: end[0] if end else None].tolist())
        return found, [held] * len(rows)

    def unhide(self) -> None:
        for layer in self.layers:
            layer.masked_key_indices = None

    def shipped(self, side: dict[str, Any]) -> dict[str, Any]:
        """Of one press, or of the dense model, on the first question."""
        press: Any = contextlib.nullcontext()
        ids, question = self.text["ids"], self.text["questions"][0]
        if side["share"] < 1:
            keep = ratio(keep_of(side, self.text, question), len(ids))
            press = getattr(kvpress, side["name"])(compression_ratio=keep)(self.model)
        with contextlib.suppress(AttributeError):  # of glibc
            ctypes.CDLL(None).malloc_trim(0)  # what is free counts as free
        with contextlib.suppress(OSError):  # of Linux
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        cache, before, begin = DynamicCache(), peak_bytes(), time.process_time()
        with press:
            self.model.model(input_ids=torch.tensor([ids]), past_key_values=cache)
        found: dict[str, Any] = {"prefill": len(ids) / (time.process_time() - begin)}
        found["peak_bytes"] = peak_bytes() - before
        answer: list[int] = []
        tokens, start = tail_of(question, False), len(ids)
        while len(answer) < 2 * self.more:
            if len(answer) == 1:
                begin = time.process_time()
            places = torch.arange(start, start + len(tokens))[None]
            output = self.model(
                torch.tensor([tokens]), past_key_values=cache, position_ids=places, logits_to_keep=1
            )
            answer.append(int(output.logits[0, -1].argmax()))
            start, tokens = start + len(tokens), answer[-1:]
        found["decode"] = (len(answer) - 1) / (time.process_time() - begin)
        self.unhide()
        return found | {"tokens": answer}


def tail_of(question: dict[str, Any], is_known: bool) -> list[int]:
    """What follows uncompressed."""
    return list(question["prefix"] if is_known else question["ids"] + question["prefix"])


def keep_of(side: dict[str, Any], text: dict[str, Any], question: dict[str, Any]) -> int:
    """Tokens that a press keeps: the share of the prompt, less those that follow uncompressed."""
    whole = len(text["ids"]) + len(question["ids"]) + len(question["prefix"])
    return max(1, round(side["share"] * whole) - len(tail_of(question, side["known"])))


def ratio(keep: int, tokens: int) -> float:
    """With which exactly so many tokens are kept: presses round down."""
    return 1 - (keep + 0.5) / tokens


def crop(cache: Any, length: int) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]


def peak_bytes() -> int:
    """That this process has taken; 0 where Linux does not tell."""
    status = Path("/proc/self/status")
    found = re.findall(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.is_file() else [0]
    return 1024 * int(found[0])


if __name__ == "__main__":
    main(sys.argv[1])
