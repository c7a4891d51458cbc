"""train.py as a user meets it: exit codes, run folders, resuming, sweeps, nothing heavy too early."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

from rlhf_lightning.config import cli
from rlhf_lightning.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "lightning", "transformers", "peft", "bitsandbytes", "wandb", "numpy", "datasets")


def train(*line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *line], cwd=cwd, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def ended(monkeypatch, tmp_path):
    """In-process runs whose training is one line: what the run does is not this file's matter, its end is."""
    seen = []

    def run(config, output_dir):
        seen.append((config, output_dir))
        match config.seed:
            case 7:
                raise RuntimeError("out of luck")
            case 8:
                raise UserError("data.path=x holds no prompts")
            case 9:
                raise SystemExit(1)
            case 10:
                raise KeyboardInterrupt
            case 11:
                raise SystemExit(0)
        return config.ppo.clip

    module = types.ModuleType("rlhf_lightning.run")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rlhf_lightning.run", module)
    monkeypatch.chdir(tmp_path)
    return seen


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (["ppo.clp=0.2"], "ppo.clp is no setting; did you mean ppo.clip?"),
        (["model=lama7b"], "model=lama7b is not offered; did you mean model=llama7b?"),
        (["ppo.clip=["], "ppo.clip=[ cannot be read"),
        (["-m", "ppo.clip=0.1,9"], "nothing was started: 1 of 2 jobs"),
        (["--hepl"], "--hepl is no option; did you mean --help?"),
        (["--cfg", "job", "model=lama7b"], "model=lama7b is not offered"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_ends_in_one_message(line, sentence, tmp_path):
    ended = train(*line, cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith(sentence)
    assert ended.stdout == ""
    assert not any(word in ended.stderr for word in ("Traceback", "HYDRA_FULL_ERROR", "hydra.cc"))
    assert list(tmp_path.iterdir()) == []


def test_nothing_heavy_is_loaded_before_the_verdict(tmp_path):
    code = f"""
import sys, json, pathlib
sys.path.insert(0, {str(ROOT)!r})
from rlhf_lightning.config.cli import main
lines = (["--help"], ["ppo.clip=7"], ["-m", "ppo.clp=1,2"])
codes = [main(pathlib.Path({str(ROOT)!r}), line) for line in lines]
print(json.dumps([codes, sorted(set({HEAVY!r}) & set(sys.modules))]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [[0, 1, 1], []]


def test_hydras_own_pages_are_reachable(tmp_path):
    shown = train("--cfg", "job", "ppo.clip=0.3", "--package", "ppo", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert yaml.safe_load(shown.stdout)["clip"] == 0.3
    assert list(tmp_path.iterdir()) == []


def test_a_run_leaves_its_plain_settings_and_nothing_elsewhere(ended, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "do-not-write-me")
    assert cli.main(ROOT, ["ppo.lr=${ppo.critic_lr}", "hydra.run.dir=here"]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["here"]
    config, folder = ended[0]
    assert folder == tmp_path / "here"
    text = (folder / "config_resolved.yaml").read_text()
    assert "${" not in text
    assert yaml.safe_load(text) == config.model_dump(mode="json")
    assert config.ppo.lr == config.ppo.critic_lr
    assert (folder / ".hydra" / "overrides.yaml").read_text() == "- ppo.lr=${ppo.critic_lr}\n"
    written = [p.read_text() for p in folder.rglob("*") if p.is_file()]
    assert not any("do-not-write-me" in content for content in written)


def test_two_runs_never_share_a_folder(ended, tmp_path):
    assert [cli.main(ROOT, []) for _ in range(2)] == [0, 0]
    assert ended[0][1] != ended[1][1]
    with pytest.raises(UserError, match="belongs to another run"):
        cli.write_resolved(ended[0][0], ended[0][1])


@pytest.mark.parametrize(
    ("seed", "code", "told", "kept"),
    [
        (7, 1, "RuntimeError: out of luck", "RuntimeError: out of luck"),
        (8, 1, "data.path=x holds no prompts\n", "data.path=x holds no prompts"),
        (9, 1, "", "ended with exit code 1"),
        (10, 130, "interrupted; continue with: python train.py resume={here}\n", None),
        (11, 0, "", None),
    ],
)
def test_how_a_run_ends_is_its_exit_code(seed, code, told, kept, ended, tmp_path, capsys):
    assert cli.main(ROOT, [f"seed={seed}", "hydra.run.dir=here"]) == code
    err, told = capsys.readouterr().err, told.replace("{here}", str(tmp_path / "here"))
    assert err.endswith(f"{told}\n" if seed == 7 else told)
    assert ("Traceback" in err) is (seed == 7)
    error = tmp_path / "here" / "error.txt"
    assert error.is_file() is (kept is not None)
    assert kept is None or kept in error.read_text()


def test_an_interrupted_run_says_how_to_go_on(ended, tmp_path, capsys):
    (tmp_path / "old" / "checkpoints").mkdir(parents=True)
    (tmp_path / "old" / "checkpoints" / "last.ckpt").touch()
    (tmp_path / "old" / "config_resolved.yaml").write_text("seed: 10\nreward: {kind: length, target: 3}\n")
    assert cli.main(ROOT, ["resume=old"]) == 130
    assert (
        capsys.readouterr().err == f"interrupted; continue with: python train.py resume={tmp_path / 'old'}\n"
    )


def test_resume_takes_the_run_s_own_settings_and_the_further_ones(ended, tmp_path):
    assert cli.main(ROOT, ["model=gpt2", "reward=length", "ppo.clip=0.3", "hydra.run.dir='a=b'"]) == 0
    overrides = (tmp_path / "a=b" / ".hydra" / "overrides.yaml").read_text()
    assert cli.main(ROOT, ["resume=a=b/checkpoints/last.ckpt", "ppo.beta=0.5"]) == 0
    first, again = ended[0][0], ended[1][0]
    assert ended[1][1] == tmp_path / "a=b"
    assert again.resume == str(tmp_path / "a=b")
    assert again.model == first.model
    assert (again.ppo.clip, again.ppo.beta) == (0.3, 0.5)
    assert again.model_copy(update={"resume": None, "ppo": first.ppo}) == first
    assert (tmp_path / "a=b" / ".hydra" / "overrides.yaml").read_text() == overrides
    assert yaml.safe_load((tmp_path / "a=b" / "config_resolved.yaml").read_text())["ppo"]["beta"] == 0.5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a=b"]


def test_what_cannot_be_resumed(ended, tmp_path, capsys):
    assert cli.main(ROOT, ["reward=length", "hydra.run.dir=outputs/day/time"]) == 0
    capsys.readouterr()
    run = tmp_path / "outputs" / "day" / "time"
    wrong = {
        "resume=outputs": "resume=outputs is no run: it holds no config_resolved.yaml; "
        f"the nearest run is {run}",
        "resume=outputs/day/tim": f"resume=outputs/day/tim is not there; the nearest run is {run}",
    }
    for word, sentence in wrong.items():
        assert cli.main(ROOT, [word]) == 1
        assert capsys.readouterr().err == sentence + "\n"
    assert cli.main(ROOT, [f"resume={run}", "reward=regex"]) == 1
    assert "reward=regex cannot change on resume" in capsys.readouterr().err
    assert cli.main(ROOT, [f"resume={run}", "-m", "seed=1,2"]) == 1
    assert "continues one run: leave out -m" in capsys.readouterr().err
    assert cli.main(ROOT, [f"resume={run}", "ppo.clp=1"]) == 1
    assert capsys.readouterr().err == "ppo.clp is no setting; did you mean ppo.clip?\n"
    for text, sentence in (("a: [", "cannot be read"), ("- 1", "holds no settings")):
        (run / "config_resolved.yaml").write_text(text)
        assert cli.main(ROOT, [f"resume={run}"]) == 1
        assert sentence in capsys.readouterr().err


def test_a_failing_job_hides_no_other_and_is_not_hidden(ended, tmp_path, capsys):
    assert cli.main(ROOT, ["-m", "seed=7,1,8", "hydra.sweep.dir=sweep"]) == 1
    out, err = capsys.readouterr()
    assert len(ended) == 3
    assert err.index("out of luck") < err.index("holds no prompts")
    sweep = tmp_path / "sweep"
    assert "RuntimeError: out of luck" in (sweep / "0" / "error.txt").read_text()
    assert not (sweep / "1" / "error.txt").exists()
    assert (sweep / "2" / "error.txt").read_text() == "data.path=x holds no prompts\n"
    assert "3 jobs: 1 ok, 2 failed" in out
    assert f"failed  RuntimeError: out of luck  {sweep / '0'}" in out
    assert f"ok      0.2  {sweep / '1'}" in out
    resolved = [yaml.safe_load((sweep / str(i) / "config_resolved.yaml").read_text()) for i in range(3)]
    assert [settings["seed"] for settings in resolved] == [7, 1, 8]
    assert [p.name for p in tmp_path.iterdir()] == ["sweep"]


def test_the_help_page(capsys):
    assert cli.main(ROOT, ["--help"]) == 0
    page = capsys.readouterr().out
    for word in (
        "python train.py model=llama7b ppo.clip=0.2",
        "tiny*",
        "ppo.clip",
        "epsilon: the ratio",
        "resume=",
    ):
        assert word in page
    assert cli.main(ROOT, ["--help", "reward"]) == 0
    page = capsys.readouterr().out
    assert "choices: reward=..." in page
    assert "reward.function" in page
    assert cli.main(ROOT, ["--help", "pop"]) == 1
    assert capsys.readouterr().err == "--help pop names no section and no group; did you mean ppo?\n"
    assert cli.main(ROOT, ["--help", "experiment"]) == 0
    assert "SmolLM2-135M writes on" in capsys.readouterr().out


def test_the_version(capsys):
    assert cli.main(ROOT, ["--version"]) == 0
    assert capsys.readouterr().out.startswith("rlhf_lightning 0.")
