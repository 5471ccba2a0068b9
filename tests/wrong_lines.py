"""Command lines that are wrong in one way each, and words that the sentence on them must have. The
files they name are made by tests/unit/test_wrong_commands.py."""

SMALL = "tiny-qwen3-2layer"

# Copies of the smallest model that are wrong in one way each, and words of recover's sentence.
MODELS = {
    "no_weights": "no_weights safetensors",
    "cut_weights": "cut_weights",
    "misshapen": "misshapen q_proj [1, [256,",
    "few_weights": "few_weights 11 model.layers.1.",
    "lost_shard": "lost_shard/b.safetensors",
    "neg_layers": "neg_layers/config.json num_hidden_layers -2",
    "one_layer": "one_layer layers.1.",
    "odd_heads": "odd_heads 12 8",
    "odd_type": "odd_type qwen9",
    "small_vocab": "small_vocab embed_tokens [100,",
    "no_positions": "no_positions/config.json max_position_embeddings",
    "own_window": "sliding_window=128",
    "quantized": "quantized",
    "hybrid": "hybrid --reverse",
    "deep_config": "deep_config/config.json",
    "tok_empty": "tok_empty",
    "tok_no_end": "tok_no_end end",
    "gen_eos": "gen_eos/generation_config.json eos_token_id 'end'",
}

# A command line, and words that its sentence must have.
WRONG_LINES = {
    # the command itself
    "recovr": "recovr 'recover'",
    "--ratio .5": "--ratio recover",
    # recover
    "recover --ratoi .5": "--ratoi --ratio",
    "recover --ratio 1.2": "ratio 1.2",
    "recover --seed=--": "--seed=--",
    "recover --method from_file --mask.options path=smollm2-135m@0.75": "mask.json tiny-qwen3",
    "recover --method bosh": "--method bosh 'bosch'",
    "recover --model notes.txt": "--model notes.txt",
    "recover --model broken_json/": "broken_json/config.json",
    "recover --train.kernels fast": "--train.kernels 'fast' 'liger'",
    "recover --mask.options kapa=3": "kapa=3",
    "recover --fresh maks": "--fresh maks 'mask'",
    "recover --data.tokens-from broken_tokens": "broken_tokens",
    "recover --data.tokens 100": "data.tokens 100",
    "recover --rehearse 3": "2 sequences 3 processes",
    "recover --data.source nowhere.jsonl": "nowhere.jsonl",
    "recover --preset smoke --hours .0001": "--hours 0.0001 --hours",
    "recover --preset smoke --config notes.txt": "--preset --config",
    "recover --config notes.txt": "notes.txt",
    "recover --run-dir notes.txt": "notes.txt",
    "recover --preset smoke --run-dir in_use": "in_use",
    "recover --preset smoke --run-dir broken_run": "broken_run/mask/started.json",
    "recover --window 2048": "--window 2048 2,048",
    "recover --eval.niah-lengths 99 512": "--niah-lengths 99",
    "recover --data.min-document-tokens 1000000": "min_document_tokens 1,000,000",
    "recover --preset smoke --data.tokens-from tokens --data.tokens 1M": "tokens 3,906",
    "recover --data.tokens 9000000000 --train.objective distill --train.stored-shares 9999": (
        "stored_shares 9999 2,048"
    ),
    "recover --train.objective distill --train.stored-shares 0": "train.stored_shares at least 1",
    "recover --train.objective next-token --train.stored-shares 5": "stored_shares 5 next-token",
    "recover --train.stored-shares 8 --train.layer-weight 1": "train.layer_weight leave out",
    "answers --tokens-from nowhere": "nowhere does not exist",
    "answers --share 2 --tokens-from nowhere": "share is 2.0; it must be above 0 and at most 1",
    "lessons --tokens-from nowhere": "nowhere does not exist",
    "lessons --shares 0 --tokens-from nowhere": "stored_shares at least 1",
    "recover --train.until recovered": "train.until 25 --eval.samples",
    **{f"recover --model {name}": words for name, words in MODELS.items()},
    # search, calibrate
    "search --method fisher": "fisher --calibration",
    "search --method from_file --path deep.json": "deep.json",
    "calibrate --examples 0": "examples 0",
    # materialize
    f"materialize --model {SMALL}": "--out",
    f"materialize --model {SMALL} --mask broken.json --out out": "broken.json",
    f"materialize --model {SMALL} --mask notes.npz --out out": "notes.npz",
    f"materialize --model {SMALL} --mask mask.json --out out": "mask.json org/small",
    "materialize --model good --mask three_mask.json --out out": "three_mask.json 3",
    # tokens
    "tokens --source toy@-1": "toy@-1",
    "tokens --tokens many": "--tokens 'many'",
    # train
    f"train --model {SMALL} --out out --tokens-from nowhere": "nowhere",
    f"train --model {SMALL} --out out --tokens-from broken_tokens": "broken_tokens",
    "recover --preset smoke --train.precision fp8": "train.precision fp8",
    "recover --preset smoke --train.precision fp8-rowwise": "train.precision fp8-rowwise",
    "train --model good --tokens-from calibration --out out": "calibration tokens.json",
    "train --model good --tokens-from tokens --out out --tokens 1M": "tokens",
    # evaluate
    "evaluate --suite niha": "niha 'niah'",
    "evaluate --niah-lengths 9999": "9999",
    "evaluate --model good --yarn-from 512": "--yarn-from --yarn",
    "evaluate --suite lm-eval:own --include-path nowhere": "--include-path nowhere folder",
    "evaluate --engine vllm": "vllm docs/serving.md",
    "evaluate --model hybrid --window 2048": "--window 2048",
    f"evaluate --model {SMALL} --niah-lengths 256 --window 8": f"--window 8: {SMALL}",
    "evaluate --suite longbench --longbench-data good --longbench-categories official": (
        "good narrativeqa"
    ),
    f"evaluate --model {SMALL} --options niah.sede=1": "niah: sede=1: 'seed'",
    # compare, sweep
    "compare nowhere": "nowhere",
    "compare --basline fisher": "--basline --baseline",
    "sweep --methods bosch,fihser": "fihser 'fisher'",
    "sweep --methods bosch --model few_weights": "few_weights 11",
    "sweep --methods bosch --vary window=32,64 --baseline window=16": "window=16 --vary",
    "sweep --methods bosch --vary run_dir=a,b": "run_dir=a,b --run-dir",
    "sweep --methods bosch --vary model=tiny-qwen3,nothing-there": "nothing-there",
    "sweep --methods bosch --windows 64,x": "--windows 'x'",
    "sweep --methods bosch --lengths 512 --eval.suites longbench": "--lengths 512: niah",
    "sweep --methods bosch --rows finished.csv": "--rows finished.csv",
    "sweep --methods bosch --command nothing-there": "--command 'nothing-there'",
    # generate
    f"generate --model {SMALL}": "--prompt --prompt-file",
    f"generate --model {SMALL} --prompt-file notes.npz": "notes.npz",
    f"generate --model {SMALL} --prompt a --top-p 2": "top_p 2.0",
    f"serve --model {SMALL}": "bosch_vllm docs/serving.md",
    "serve --model nothing-there": "nothing-there",
    "generate --model nan_weights --prompt a": "nan_weights finite",
    # analyze, mask
    "analyze": "",
    "mask show broken.json": "broken.json",
    "mask show nested_mask.json": "nested_mask.json nested",
    "mask import nan.tsv --model good --window 8 --ratio .5": "nan.tsv nan",
    # suites
    f"ruler build --task x --length 256 --tokenizer {SMALL} --out out": "",
    "ruler build --task qa_1 --length 1024 --tokenizer good --squad notes.npz --out o": "notes.npz",
    f"niah build --task x --length 256 --tokenizer {SMALL} --essays toy --out out": "",
    # empty values: as a path, each would be the current folder
    "recover --run-dir=": "--run-dir empty",
    "materialize --model good --mask '' --out out": "--mask empty",
    "mask show good_mask.json --png ''": "--png empty",
}
