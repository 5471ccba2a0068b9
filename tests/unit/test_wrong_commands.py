"""Wrong command lines and inputs of every program: exit code 2, one sentence that names the value,
no traceback, no new file or folder, and every file as before.

Most run in this process through the command `bosch`; some run as programs, where torch must not be
imported for a mistake that the command line alone shows.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import benchmarks.__main__
from bosch.__main__ import PROGRAMS, start
from bosch.assets import asset_folder
from bosch.hybrid.materialize import materialize
from bosch.hybrid.shards import INDEX, SINGLE
from bosch.masks.mask import GroupMask, MaskFile, write_mask
from bosch.model import read_model_info
from bosch.run.lock import LockRecord
from tests.masks import small_record

SMALL = "tiny-qwen3-2layer"
DEEP = "[" * 100_000 + "]" * 100_000  # deeper than Python reads
NESTED = "[" * 500 + "]" * 500  # deeper than Python copies
TOKENS = "--source toy --tokens 2048 --sequence-length 256 --held-out-sequences 1 --workers 1"
CALIBRATION = "--length 256 --examples 2 --questions-per-context 2"

# Copies of the smallest model that are wrong in one way each, and words of recover's sentence.
MODELS = {
    "no_weights": "no_weights safetensors",
    "empty_weights": "empty_weights",
    "cut_weights": "cut_weights",
    "misshapen": "misshapen q_proj [1, [256,",
    "few_weights": "few_weights 11 model.layers.1.",
    "lost_shard": "lost_shard/b.safetensors",
    "neg_layers": "neg_layers/config.json num_hidden_layers -2",
    "str_layers": "str_layers 'two'",
    "three_layers": "three_layers (3) (2)",
    "one_layer": "one_layer layers.1.",
    "few_heads": "few_heads o_proj",
    "odd_heads": "odd_heads 12 8",
    "odd_type": "odd_type qwen9",
    "list_type": "list_type",
    "str_types": "str_types layer_types",
    "odd_act": "odd_act swoosh",
    "small_vocab": "small_vocab embed_tokens [100,",
    "no_positions": "no_positions/config.json max_position_embeddings",
    "own_window": "sliding_window=128",
    "quantized": "quantized",
    "hybrid": "hybrid --reverse",
    "deep_config": "deep_config/config.json",
    "nested_config": "nested_config/config.json nested",
    "tok_empty": "tok_empty",
    "tok_none": "tok_none",
    "tok_no_end": "tok_no_end end",
    "gen_eos": "gen_eos/generation_config.json eos_token_id 'end'",
}

# A command line, and words that its sentence must have.
WRONG_LINES = {
    # the command itself
    "recovr": "recovr 'recover'",
    "--ratio .5": "--ratio recover",
    "mask shwo mask.json": "shwo 'show'",
    "niah score": "score build",
    # recover
    "recover --ratoi .5": "--ratoi --ratio",
    "recover .5": "'.5'",
    "recover --ratio": "--ratio",
    "recover --ratio 1.2": "ratio 1.2",
    "recover --ratio -0.1": "ratio -0.1",
    "recover --ratio half": "--ratio 'half'",
    "recover --window 0": "window 0",
    "recover --window 3x": "--window '3x'",
    "recover --seed -1": "seed -1",
    "recover --method bosh": "--method bosh 'bosch'",
    "recover --preset papr": "--preset papr 'paper'",
    "recover --model notes.txt": "--model notes.txt",
    "recover --model empty/": "empty config.json",
    "recover --model broken_json/": "broken_json/config.json",
    "recover --model list_json/": "list_json/config.json",
    "recover --model no_shape/": "no_shape num_hidden_layers",
    "recover --train.attention flsh": "train.attention flsh",
    "recover --train.kernels fast": "--train.kernels 'fast' 'liger'",
    "recover --train.betas .9 1": "train.betas 1.0",
    "recover --train.batch-sequences 2.5": "--train.batch-sequences '2.5' whole",
    "recover --mask.options kapa=3": "kapa=3",
    "recover --mask.kappa 0": "mask.kappa 0",
    "recover --fresh maks": "--fresh maks 'mask'",
    "recover --from trian": "--from trian 'train'",
    "recover --data.tokens-from empty": "empty",
    "recover --data.tokens-from broken_tokens": "broken_tokens",
    "recover --data.tokens 100": "data.tokens 100",
    "recover --rehearse 0": "0 GPUs",
    "recover --rehearse 3": "2 sequences 3 processes",
    "recover --rehearse x": "--rehearse 'x'",
    "recover --data.source nowhere.jsonl": "nowhere.jsonl",
    "recover --calibration.essays nowhere.json": "nowhere.json",
    "recover --run-dir notes.txt": "notes.txt",
    "recover --preset smoke --run-dir in_use": "in_use",
    "recover --preset smoke --run-dir broken_run": "broken_run/mask/started.json",
    "recover --eval.niah-lengths 512 256": "eval.niah_lengths 512, 256",
    "recover --eval.checkpoints 0 2": "eval.checkpoints 2.0",
    # search
    "search --method fihser": "fihser 'fisher'",
    "search --method fisher": "fisher --calibration",
    "search --method fisher --calibration nowhere": "nowhere",
    "search --method fisher --calibration empty": "empty",
    "search --method interleave --kapa 3": "--kapa --help",
    "search --method from_file": "--path",
    "search --method from_file --path nowhere.json": "nowhere.json",
    # calibrate
    "calibrate --examples 0": "examples 0",
    "calibrate --examples 5 --questions-per-context 2": "examples 5 2",
    "calibrate --length 99999": "--length 99999",
    "calibrate --tasks niah_single_9": "niah_single_9",
    "calibrate --against nowhere.jsonl": "--against nowhere.jsonl",
    "calibrate --against notes.txt": "notes.txt",
    "calibrate --essays notes.npz": "notes.npz",
    # materialize
    f"materialize --model {SMALL}": "--out",
    f"materialize --model {SMALL} --mask nowhere.json --out out": "nowhere.json",
    f"materialize --model {SMALL} --mask broken.json --out out": "broken.json",
    f"materialize --model {SMALL} --mask list.json --out out": "list.json",
    f"materialize --model {SMALL} --mask notes.npz --out out": "notes.npz",
    f"materialize --model {SMALL} --mask mask.json --out out": "mask.json org/small",
    f"materialize --model {SMALL} --mask mask.json --out out --reverse": "--reverse --mask",
    f"materialize --model {SMALL} --out out --reverse": SMALL,
    # tokens
    "tokens --source nowhere.jsonl": "nowhere.jsonl",
    "tokens --source toy@-1": "toy@-1",
    "tokens --sequence-length 1": "sequence_length 1",
    "tokens --tokens many": "--tokens 'many'",
    "tokens --model empty/ --source toy": "empty",
    "tokens --seed -3": "seed -3",
    # train
    f"train --model {SMALL} --out out": "--tokens",
    f"train --model {SMALL} --out out --tokens nowhere": "nowhere",
    f"train --model {SMALL} --out out --tokens empty": "empty",
    f"train --model {SMALL} --out out --tokens broken_tokens": "broken_tokens",
    f"train --model {SMALL} --out out --tokens empty --betas .9": "--betas 2",
    f"train --model {SMALL} --out out --tokens empty --precision fp8": "--precision 'fp8'",
    f"train --model {SMALL} --out out --tokens empty --evaluated 0 3": "evaluated 3.0",
    f"train --model {SMALL} --out out --tokens empty --budget 0": "budget 0",
    "train --model empty/ --out out --tokens empty": "empty",
    # evaluate
    "evaluate --suite niha": "niha 'niah'",
    "evaluate --suite": "--suite",
    "evaluate --suite lm-eval:": "lm-eval:",
    "evaluate --window 8": "--window 8",
    "evaluate --lengths 9999": "9999",
    "evaluate --limit 0": "samples 0",
    "evaluate --yarn .5": "yarn 0.5",
    "evaluate --engine vllm": "vllm docs/serving.md",
    "evaluate --suite longbench --longbench-data nowhere/": "nowhere",
    "evaluate --suite gsm8k --gsm8k-data notes.txt": "notes.txt",
    "evaluate --suite gsm8k --gsm8k-tasks gsm9k": "gsm9k",
    # compare, sweep
    "compare nowhere": "nowhere",
    "compare empty notes.txt": "empty notes.txt",
    "compare --basline fisher": "--basline --baseline",
    "compare broken_run --rebuild-tb=3": "3",
    "compare broken.jsonl": "broken.jsonl",
    "sweep": "--methods",
    "sweep --methods bosch,fihser": "fihser 'fisher'",
    "sweep --methods fisher --ratios x": "x",
    "sweep --methods fisher --seeds 0": "seeds 0",
    "sweep --methods fisher --windows 8,a": "--windows 8,a",
    "sweep --methods fisher --run-dir out": "--run-dir",
    "sweep --methods fisher --rations .5": "--rations",
    "sweep --methods fisher --rows broken.jsonl": "broken.jsonl",
    # generate
    f"generate --model {SMALL}": "--prompt --prompt-file",
    f"generate --model {SMALL} --prompt a --prompt-file notes.txt": "--prompt --prompt-file",
    f"generate --model {SMALL} --prompt-file nowhere.txt": "nowhere.txt",
    f"generate --model {SMALL} --prompt-file notes.npz": "notes.npz",
    f"generate --model {SMALL} --prompt a --top-p 2": "top_p 2.0",
    f"generate --model {SMALL} --prompt a --engine vllm": "vllm docs/serving.md",
    f"generate --model {SMALL} --prompt a --engine vllm --device cpu": "--device --engine",
    f"generate --model {SMALL} --prompt a --device tpu": "--device 'tpu'",
    "generate --model nowhere/ --prompt a": "nowhere/",
    "generate --model broken_weights/ --prompt a": "broken_weights",
    # analyze, mask
    "analyze nowhere.json": "nowhere.json",
    "analyze": "",
    "analyze broken.json": "broken.json",
    "analyze mask.json --seeds 0": "seeds 0",
    "analyze mask.json --replacement": "--replacement",
    "mask show": "PATH",
    "mask show nowhere.json": "nowhere.json",
    "mask show broken.json": "broken.json",
    "mask show list.json": "list.json",
    "mask show empty": "empty",
    "mask show notes.npz": "notes.npz",
    "mask show mask.json --context 0": "--context 0",
    "mask export mask.json --format exl --out out": "--format 'exl'",
    "mask import notes.txt --format duo --model nowhere": "nowhere",
    f"mask import notes.txt --format duo --model {SMALL} --window 8 --ratio .5": "notes.txt",
    f"mask import broken.json --format layer_types --model {SMALL}": "broken.json",
    # suites
    f"niah build --task x --length 256 --tokenizer {SMALL} --essays toy --out out": "",
    "longbench score --in nowhere.jsonl --out out": "nowhere.jsonl",
    "gsm8k score --in broken.jsonl --out out": "broken.jsonl",
    # empty values: as a path, each would be the current folder
    "recover --run-dir ''": "--run-dir empty",
    "recover --run-dir=": "--run-dir empty",
    "recover --model ''": "--model empty",
    "recover --data.source ''": "--data.source empty",
    "recover --data.tokens-from ''": "--data.tokens-from empty",
    "search --calibration ''": "--calibration empty",
    "calibrate --out ''": "--out empty",
    "materialize --model good --mask '' --out out": "--mask empty",
    "materialize --model good --mask good_mask.json --out ''": "--out empty",
    "tokens --out ''": "--out empty",
    "train --model good --tokens '' --out out": "--tokens empty",
    "evaluate --suite ''": "--suite empty",
    "compare ''": "argument empty",
    "sweep --methods ''": "--methods empty",
    "sweep --methods bosch --rows ''": "--rows empty",
    "generate --model good --prompt ''": "--prompt empty",
    "analyze ''": "argument empty",
    "mask show good_mask.json --png ''": "--png empty",
    "longbench score --in '' --out out": "--in empty",
    # recover: numbers, and settings that contradict each other or leave nothing
    "recover --ratio nan": "ratio nan",
    "recover --window 1000000": "--window 1000000 2,048",
    "recover --window 2048": "--window 2048 2,048",
    "recover --seed 1.5": "--seed '1.5'",
    "recover --fresh mask --from eval": "--fresh mask --from eval",
    "recover --eval.checkpoints": "eval.checkpoints ()",
    "recover --eval.suites": "eval.suites",
    "recover --eval.niah-lengths 1": "--niah-lengths 1",
    "recover --eval.niah-lengths 99 512": "--niah-lengths 99",
    "recover --eval.longbench-data notes.txt": "notes.txt",
    "recover --calibration.length 10": "10",
    "recover --calibration.length 9999": "--calibration.length 9999",
    "recover --calibration.essays broken.json": "broken.json",
    "recover --data.source": "data.source",
    "recover --data.source toy@0": "toy@0",
    "recover --data.source nul.jsonl": "nul.jsonl NUL",
    "recover --data.source other.jsonl": "other.jsonl 'text'",
    "recover --data.source notes.npz": "notes.npz",
    "recover --data.min-document-tokens 1000000": "min_document_tokens 1,000,000",
    "recover --data.tokens-from good": "good",
    "recover --preset smoke --data.tokens-from tokens --data.tokens 1M": "tokens 3,906",
    "recover --preset smoke --data.tokens-from tokens --data.sequence-length 128": "tokens 256 128",
    "recover --mask.alpha inf": "mask.alpha inf",
    "recover --mask.ratio-buckets 0 2": "2.0",
    "recover --train.clip-norm inf": "train.clip_norm inf",
    "recover --train.objective imitate": "--train.objective 'imitate' 'distill'",
    "recover --train.distill-weight 1.5": "train.distill_weight 1.5",
    "recover --train.temperature 0": "train.temperature 0",
    "recover --train.layer-weight -1": "train.layer_weight -1",
    "recover --train.trained head": "--train.trained 'head' 'norms'",
    "recover --train.objective distill --train.top-k 9999": "train.top_k 9999 2,048",
    "recover --train.objective distill --train.teacher nowhere": "train.teacher nowhere",
    "recover --train.objective distill --train.teacher list_json/": "list_json/config.json",
    "recover --train.top-k 5": "train.top_k 5 next-token distill",
    "recover --train.lora-rank 5": "train.lora_rank 5 all lora",
    "recover --train.objective distill --train.layer-weight 1 --train.teacher tiny-qwen3": (
        "train.layer_weight train.teacher"
    ),
    "recover --train.until recovered": "train.until 25 --eval.samples",
    # recover: models whose config, weights or tokenizer are wrong
    **{f"recover --model {name}": words for name, words in MODELS.items()},
    # search, calibrate
    "search --preset papr": "--preset papr 'paper'",
    "search --method interleave --window 4096 --model good": "--window 4096",
    "search --method interleave --model own_window": "sliding_window=128",
    "search --method interleave --model no_weights": "no_weights",
    "search --method fisher --calibration notes.txt": "notes.txt",
    "search --method from_file --path deep.json": "deep.json",
    "calibrate --length 10": "10",
    "calibrate --essays deep.json": "deep.json",
    "calibrate --model tok_empty": "tok_empty",
    "calibrate --out notes.txt": "notes.txt",
    # materialize, tokens
    "materialize --model good --mask wide_mask.json --out out": "--window 100000",
    "materialize --model good --mask three_mask.json --out out": "three_mask.json 3",
    "materialize --model good --mask nested_mask.json --out out": "nested_mask.json nested",
    "materialize --model good --mask good_mask.json --out notes.txt": "notes.txt",
    "materialize --model hybrid --mask good_mask.json --out out": "hybrid --reverse",
    "materialize --model neg_layers --mask good_mask.json --out out": "num_hidden_layers -2",
    "tokens --source nul.txt": "nul.txt NUL",
    "tokens --source other.jsonl": "other.jsonl 'text'",
    "tokens --source toy --min-document-tokens 1000000": "min_document_tokens 1,000,000",
    "tokens --model tok_no_end": "tok_no_end end",
    "tokens --out notes.txt": "notes.txt",
    # train, evaluate
    "train --model no_weights --tokens tokens --out out": "no_weights",
    "train --model cut_weights --tokens tokens --out out": "cut_weights",
    "train --model misshapen --tokens tokens --out out": "misshapen q_proj [1,",
    "train --model own_window --tokens tokens --out out": "sliding_window=128",
    "train --model tok_empty --tokens tokens --out out": "tok_empty",
    "train --model good --tokens calibration --out out": "calibration tokens.json",
    "train --model good --tokens tokens --out notes.txt": "notes.txt",
    "train --model good --tokens tokens --out out --budget 10": "10",
    "train --model good --tokens tokens --out out --budget 1M": "tokens",
    "train --model good --tokens tokens --out out --micro-batch-sequences 7": "7",
    "evaluate --model no_weights": "no_weights",
    "evaluate --model empty_weights": "empty_weights",
    "evaluate --model deep_config": "deep_config/config.json",
    "evaluate --model tok_none": "tok_none",
    "evaluate --model good --lengths 1": "--niah-lengths 1",
    "evaluate --model good --yarn nan": "yarn nan",
    "evaluate --model hybrid --window 2048": "--window 2048",
    "evaluate --suite gsm8k --gsm8k-data blank.jsonl": "blank.jsonl 0",
    # compare, sweep
    "compare good": "good",
    "compare list.json": "list.json",
    "sweep --methods bosch --windows 1000000": "--window 1000000",
    "sweep --methods bosch --model few_weights": "few_weights 11",
    "sweep --methods bosch --out notes.txt": "--out notes.txt",
    # generate
    "generate --model good --prompt-file nul.txt": "nul.txt NUL",
    "generate --model good --prompt-file blank.txt": "prompt empty",
    "generate --model good --prompt a --temperature nan": "temperature nan",
    "generate --model nan_weights --prompt a": "nan_weights finite",
    "generate --model nan_weights --prompt a --temperature 1": "nan_weights finite",
    "generate --model misshapen --prompt a": "misshapen q_proj [1,",
    "generate --model list_json --prompt a": "list_json/config.json",
    "generate --model gen_broken --prompt a": "gen_broken/generation_config.json",
    # analyze, mask
    "analyze good_mask.json --out notes.txt": "notes.txt",
    "mask show deep.json": "deep.json",
    "mask show nested_mask.json": "nested_mask.json nested",
    "mask show good_mask.json --context": "--context 0",
    "mask show good_mask.json --png empty": "--png empty",
    "mask import nan.tsv --format duo --model good --window 8 --ratio .5": "nan.tsv 'nan'",
    "mask import good/config.json --format layer_types --model good": "--window",
    # suites
    "niah build --task niah_single_1 --length 1 --tokenizer good --essays toy --out out": "1",
    "niah build --task niah_single_1 --length 256 --samples 1 --tokenizer good --essays toy "
    "--out empty": "empty folder",
    "longbench score --in blank.jsonl --out out": "blank.jsonl",
    "longbench score --in other.jsonl --out out": "other.jsonl `dataset`",
    "gsm8k score --in blank.jsonl --out out": "blank.jsonl",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with inputs that are wrong in one way each, and one good mask."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "notes.txt").write_text("These are notes.\n")
    (folder / "notes.npz").write_bytes(b"\x93NUMPY\xff\xfe\x00")
    (folder / "broken.json").write_text('{"z": [[1, 0')
    (folder / "broken.jsonl").write_text('{"task": "gsm8k"')
    (folder / "list.json").write_text("[]")
    (folder / "nan.tsv").write_text("\t".join(["nan"] * 8) + "\n" + "\t".join("1" * 8) + "\n")
    (folder / "blank.txt").touch()
    (folder / "blank.jsonl").touch()
    (folder / "nul.txt").write_bytes(bytes(4_000))
    (folder / "nul.jsonl").write_text(json.dumps({"text": "\0" * 40_000}))
    (folder / "other.jsonl").write_text('{"words": "x"}')
    (folder / "deep.json").write_text('{"z": ' + DEEP + "}")
    (folder / "empty").mkdir()
    make_models(folder)
    make_masks(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bosch"])
        patch.chdir(folder)
        start("bosch", shlex.split(f"tokens --model good {TOKENS} --out tokens"))
        start("bosch", shlex.split(f"calibrate --model good {CALIBRATION} --out calibration"))
    (folder / "broken_tokens").mkdir()
    for name in ("manifest.json", "tokens.json"):
        (folder / "broken_tokens" / name).write_text("{")
    (folder / "broken_run" / "mask").mkdir(parents=True)
    (folder / "broken_run" / "mask" / "started.json").write_text("{")
    (folder / "in_use").mkdir()
    LockRecord.of_this_process().write(folder / "in_use")
    return folder


def make_models(folder: Path) -> None:
    """Those of MODELS but the hybrid, and a few that only other programs are given."""
    asset = asset_folder(SMALL)
    config = json.loads((asset / "config.json").read_text())

    def copy(name: str, **changes: object) -> Path:
        shutil.copytree(asset, folder / name)
        (folder / name / "config.json").write_text(json.dumps(config | changes))
        return folder / name

    copy("good")
    for name, content in {
        "broken_json": '{"model_type": ',
        "list_json": "[]",
        "no_shape": "{}",
        "deep_config": '{"a": ' + DEEP + "}",
        "nested_config": json.dumps(config)[:-1] + f', "a": {NESTED}}}',
    }.items():
        (copy(name) / "config.json").write_text(content)
    full = ["full_attention"]
    copy("neg_layers", num_hidden_layers=-2)
    copy("str_layers", num_hidden_layers="two")
    copy("three_layers", num_hidden_layers=3)
    copy("one_layer", num_hidden_layers=1, layer_types=full)
    copy("few_heads", num_attention_heads=8)
    copy("odd_heads", num_attention_heads=12)
    copy("odd_type", model_type="qwen9")
    copy("list_type", model_type=["qwen3"])
    copy("str_types", layer_types="full_attention")
    copy("odd_act", hidden_act="swoosh")
    copy("small_vocab", vocab_size=100)
    copy("no_positions", max_position_embeddings=None)
    copy("quantized", quantization_config={"quant_method": "gptq", "bits": 4})
    windows = {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0}
    copy("own_window", layer_types=["sliding_attention", *full], **windows)

    whole, weights = (asset / SINGLE).read_bytes(), load_file(asset / SINGLE)
    (copy("no_weights") / SINGLE).unlink()
    (copy("broken_weights") / SINGLE).write_bytes(b"no weights")
    (copy("empty_weights") / SINGLE).write_bytes(b"")
    (copy("cut_weights") / SINGLE).write_bytes(whole[: len(whole) // 2])
    for name, tensors in {
        "misshapen": {n: t[:1].clone() if "q_proj" in n else t for n, t in weights.items()},
        "few_weights": {n: t for n, t in weights.items() if "layers.1." not in n},
        "nan_weights": {n: t * float("nan") for n, t in weights.items()},
    }.items():
        save_file(tensors, copy(name) / SINGLE, {"format": "pt"})
    shard = copy("lost_shard") / SINGLE
    shard.rename(shard.with_name("a.safetensors"))
    places = {name: f"{'ab'[number % 2]}.safetensors" for number, name in enumerate(weights)}
    shard.with_name(INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))

    (copy("tok_empty") / "tokenizer.json").write_text("")
    for path in copy("tok_none").glob("tokenizer*"):
        path.unlink()
    path = copy("tok_no_end") / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": None}))
    (copy("gen_broken") / "generation_config.json").write_text("{")
    (copy("gen_eos") / "generation_config.json").write_text('{"eos_token_id": "end"}')


def make_masks(folder: Path) -> None:
    """One of the model `good`, its hybrid, and masks that are wrong for it in one way each."""
    info = read_model_info(folder / "good")
    good = MaskFile(GroupMask.from_rows(["11110000"] * 2, 32), info, "bosch", 0.5)
    wide = replace(good, mask=replace(good.mask, window_tokens=100_000))
    three_layers = GroupMask.from_rows(["11110000"] * 3, 32)
    three = replace(good, mask=three_layers, model=replace(info, num_layers=3))
    masks = {"mask": small_record(), "good_mask": good, "wide_mask": wide, "three_mask": three}
    for name, record in masks.items():
        write_mask(folder / f"{name}.json", record)
    content = json.loads((folder / "good_mask.json").read_text())
    content["settings"] = {"a": json.loads(NESTED)}
    (folder / "nested_mask.json").write_text(json.dumps(content))
    materialize(folder / "good", good, folder / "hybrid")


def contents(folder: Path) -> dict[str, tuple[int, int] | None]:
    """Every file with its size and time, and every folder. In a folder that was there before, the
    lock and the log of a run that began are no results."""
    return {
        str(path): None if path.is_dir() else (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if not path.name.startswith(".lock") and path.name != "recover.log"
    }


def check(status: object, output: str, errors: str, line: str, words: str) -> None:
    assert status == 2, output + errors
    assert errors.startswith("error: "), errors
    assert errors.count("\n") == 1, errors
    assert "Traceback" not in errors
    for word in words.split():
        assert word in errors, f"{line}: {errors}"


def test_every_program_is_among_them() -> None:
    assert len(WRONG_LINES) >= 223  # as many as were tried in the first day of attacks
    assert {line.split()[0] for line in WRONG_LINES} > {*PROGRAMS, "niah", "longbench", "gsm8k"}


@pytest.mark.parametrize(("line", "words"), WRONG_LINES.items())
def test_a_wrong_command_ends_in_one_sentence_and_leaves_the_files(
    line: str,
    words: str,
    inputs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(inputs)
    monkeypatch.setattr(sys, "argv", ["bosch"])  # the command sets it
    before = contents(inputs)
    with pytest.raises(SystemExit) as stop:
        start("bosch", shlex.split(line))
    printed = capsys.readouterr()
    check(stop.value.code, printed.out, printed.err, line, words)
    assert contents(inputs) == before


WRONG_BENCHMARKS = {
    "latncy": "'latncy' 'latency'",
    "latency --windw 3": "--windw --window",
    "latency --window x": "--window 'x'",
    "latency --preset nope": "--preset 'nope'",
    "latency --device tpu": "--device tpu",
    "latency --out ''": "--out empty",
}


@pytest.mark.parametrize(("line", "words"), WRONG_BENCHMARKS.items())
def test_a_wrong_benchmark_ends_in_one_sentence(
    line: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["python -m benchmarks", *shlex.split(line)])
    with pytest.raises(SystemExit) as stop:
        benchmarks.__main__.main()
    printed = capsys.readouterr()
    check(stop.value.code, printed.out, printed.err, line, words)


# Mistakes that the command line alone shows: a process with a startup of its own, without torch.
WITHOUT_TORCH = [
    "recovr",
    "recover --ratoi .5",
    "recover --ratio 1.2",
    "recover --model notes.txt",
    "calibrate --examples 0",
    f"materialize --model {SMALL}",
    "tokens --tokens many",
    f"train --model {SMALL} --out out --tokens nowhere",
    "evaluate --suite niha",
    "compare nowhere",
    "sweep",
    f"generate --model {SMALL}",
    "analyze nowhere.json",
    "mask show broken.json",
    "longbench score --in nowhere.jsonl --out out",
]
PROGRAM = """
import sys
from bosch.__main__ import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


def run_program(
    folder: Path, *words: str, stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        text=True,
        stdout=stdout,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("line", WITHOUT_TORCH)
def test_a_mistake_in_the_command_line_loads_no_torch(line: str, inputs: Path) -> None:
    done = run_program(inputs, *shlex.split(line))
    check(done.returncode, done.stdout, done.stderr, line, WRONG_LINES[line])


@pytest.mark.parametrize("line", ["recover --ratio half", "sweep", "recover --train.kernels fast"])
def test_on_a_terminal_it_is_the_same_sentence(
    line: str, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There tyro colors what it prints, and wraps it."""
    monkeypatch.setenv("COLUMNS", "40")
    reader, terminal = os.openpty()
    done = run_program(inputs, *shlex.split(line), stdout=terminal)
    os.close(terminal)
    os.close(reader)
    check(done.returncode, "", done.stderr, line, WRONG_LINES[line])
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    "program",
    [
        "",
        *PROGRAMS,
        "mask show",
        "niah build",
        "longbench score",
        "gsm8k score",
    ],
)
def test_help_loads_no_torch(program: str, inputs: Path) -> None:
    done = run_program(inputs, *program.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--help" in done.stdout
    assert "python recipes/" not in done.stdout
