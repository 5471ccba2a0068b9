"""What machines and folders hold that nobody plans for: it ends in one sentence, or works."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from bosch.assets import asset_folder
from bosch.calibration import write_calibration
from bosch.hybrid.materialize import materialize
from bosch.hybrid.registration import TESTED
from bosch.model import load_model, load_tokenizer
from bosch.recipes import presets, search_mask
from bosch.run import hub
from bosch.run.dist import rank_and_world
from bosch.run.errors import UserError
from bosch.run.folder import RunFolder
from tests.attention_matrices import toy_calibration
from tests.hybrid_folders import embedded_hybrid, plain_folder, record_for
from tests.model_factory import tiny_model

ROOT = Path(__file__).parents[2]
SIGNS = "from bosch.run import errors, progress; progress.set_up()\n"
SIGNS += "errors.exit_on_user_error(lambda: progress.say('31 \\u2013 33'), debug=False)"


def run_python(program: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    settings["env"] = os.environ | {"PYTHONPATH": str(ROOT)} | settings.get("env", {})
    how: Any = {"capture_output": True, "text": True, "errors": "replace"} | settings
    return subprocess.run([sys.executable, "-c", program], **how)


def test_output_that_cannot_show_our_signs_shows_others() -> None:
    c_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for variables in ({"PYTHONIOENCODING": "ascii"}, c_locale):
        done = run_python(SIGNS, env=variables)
        assert (done.returncode, done.stdout) == (0, "31 ? 33\n"), done.stderr


def test_output_may_be_closed() -> None:
    done = run_python(SIGNS, preexec_fn=lambda: os.close(1))
    assert done.returncode == 0, done.stderr


def test_too_little_memory_is_one_sentence() -> None:
    program = "from bosch.run.errors import exit_on_user_error as run\n"
    program += "run(lambda: bytearray(1 << 40), debug=False)"
    limit = (1 << 32, 1 << 32)
    done = run_python(program, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit))
    assert done.returncode == 2, done.stderr
    assert "memory" in done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_of_no_launch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for pair in ("0 abc", "x 2", "0 0", "5 2", "-1 1", "2 2"):
        rank, world = pair.split()
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world)
        with pytest.raises(UserError, match=f"RANK={rank} and WORLD_SIZE={world}"):
            rank_and_world()


def test_a_hub_out_of_reach_is_tried_once_and_in_silence() -> None:
    with socket.socket() as unused:  # bound, but nobody listens
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        program = "from bosch.__main__ import main; main(['recover', '--model', 'a/b'])"
        variables = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "", "NO_PROXY": "*"}
        done = run_python(program, env=variables | dict.fromkeys(hub.PROXIES, ""))
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    assert "a/b" in line


def test_a_hub_that_answers_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", *hub.PROXIES):
        monkeypatch.delenv(name, raising=False)
    hub.is_reachable.cache_clear()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub.is_reachable()
    hub.is_reachable.cache_clear()


@pytest.mark.slow
def test_a_newer_transformers_is_told_and_runs() -> None:
    program = "import transformers; transformers.__version__ = '5.999.0'; import bosch; "
    done = run_python(program + "from transformers import AutoConfig; print('ran')")
    assert done.stdout == "ran\n"
    [line] = done.stderr.splitlines()
    assert "5.999.0" in line
    assert TESTED in line
    assert f"\ntransformers=={TESTED}\n" in (ROOT / "launch" / "constraints.txt").read_text()


def test_what_stands_where_a_file_should_be_is_named(tmp_path: Path) -> None:
    makers = {"a": Path.mkdir, "b": os.mkfifo}  # a pipe for run.json is replaced as any file
    for folder, name in (("a", ".lock"), ("a", "run.json"), ("b", ".lock")):
        path = tmp_path / folder / name.strip(".") / name
        path.parent.mkdir(parents=True)
        makers[folder](path)
        with pytest.raises(UserError, match=f"{path} is a"), RunFolder(path.parent) as run:
            run.save_config(presets.smoke(), [])


def test_folders_that_cannot_be_or_be_read_are_named() -> None:
    with pytest.raises(UserError, match="/proc/x cannot be made"), RunFolder(Path("/proc/x")):
        pass
    with pytest.raises(UserError, match="UTF-8"):
        RunFolder(Path(os.fsdecode(b"r\xff")))


def test_a_model_without_generation_settings_becomes_a_hybrid(tmp_path: Path) -> None:
    dense = plain_folder(tmp_path / "dense")
    (dense / "generation_config.json").unlink()
    materialize(dense, record_for(dense), tmp_path / "hybrid")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid").config.bosch["window"] == 16


def test_tokenizers_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = len(tokenizer)
    tokenizer.add_tokens(["<one more>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=rf"ids up to {size}.*vocab_size is {size}"):
        load_tokenizer(folder)
    path = plain_folder(tmp_path / "twins") / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["b"] = content["model"]["vocab"]["a"]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="two tokens of one id"):
        load_tokenizer(tmp_path / "twins")


def test_a_tokenizer_that_ends_every_text_is_refused(tmp_path: Path) -> None:
    """Its prompts would be over before their answers."""
    folder = shutil.copytree(asset_folder("tiny-qwen3-2layer"), tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    tokenizer = load_tokenizer(folder)
    end, number = tokenizer.eos_token, tokenizer.eos_token_id
    pieces = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": end, "type_id": 0}}]
    known = {end: {"id": end, "ids": [number], "tokens": [end]}}
    ending = {"type": "TemplateProcessing", "single": pieces, "pair": pieces}
    content["post_processor"] = ending | {"special_tokens": known}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"end token behind every text.*add_eos_token"):
        load_tokenizer(folder)


def test_a_calibration_set_longer_than_the_model_is_refused(tmp_path: Path) -> None:
    tiny_model("qwen3", max_position_embeddings=100).save_pretrained(tmp_path / "model")
    (tmp_path / "set").mkdir()
    write_calibration(tmp_path / "set", toy_calibration(128, count=1))
    arguments = ["--preset", "tiny", "--window", "16", "--method", "fisher"]
    for option in ("model", "run-dir"):
        arguments += [f"--{option}", str(tmp_path / option)]
    with pytest.raises(UserError, match=r"128 tokens.*100 positions"):
        search_mask.main([*arguments, "--calibration", str(tmp_path / "set")])


def test_code_of_another_version_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = embedded_hybrid(tmp_path)
    caplog.set_level("INFO")
    load_model(folder, "auto", "cpu")
    assert "bosch materialize" not in caplog.text
    (folder / "bosch_attention_cache.py").write_text("# of an earlier version\n")
    load_model(folder, "auto", "cpu")
    assert "bosch materialize" in caplog.text
