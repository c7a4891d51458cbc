"""``stage=evaluate run=RUN``: what is taken from the run, what the command line replaces, what is refused."""

import json
from pathlib import Path

import pytest
import yaml

from rlhf_lightning.config import cli
from rlhf_lightning.config.arguments import parse
from rlhf_lightning.config.composing import Command
from rlhf_lightning.config.preflight import Plan, plan
from rlhf_lightning.config.rewards import FunctionRewardConfig
from rlhf_lightning.config.schema import Config
from rlhf_lightning.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def judge(*line: str) -> Plan:
    flags = parse(list(line))
    return plan(Command(ROOT / "conf", flags.tokens, "config", flags.multirun, flags.folders))


def judged(*line: str) -> Config:
    return judge("stage=evaluate", *line).jobs[0]


def complaint(*line: str) -> str:
    with pytest.raises(UserError) as caught:
        judge(*line)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def run(tmp_path):
    """``run("stage=dpo", summary={...}, holds="policy") -> Path``: what a run leaves, its tensors apart."""

    def make(*line: str, summary: dict | None = None, holds: str | None = "policy") -> Path:
        folder = tmp_path / "earlier"
        folder.mkdir()
        config = judge(*line).jobs[0]
        (folder / "config_resolved.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        if summary != {}:
            (folder / "summary.json").write_text(json.dumps(summary or {"status": "finished"}))
        if holds is not None:
            (folder / "adapters" / holds).mkdir(parents=True)
            (folder / "adapters" / holds / "adapter_config.json").write_text("{}")
        return folder

    return make


def test_the_runs_settings_are_taken(run):
    folder = run("seed=7", "generation.temperature=0.5", "model.lora.r=4", "ppo.beta=0.3", "evaluate.every=2")
    config = judged(f"run={folder}")
    assert (config.stage.name, config.run, config.seed) == ("evaluate", str(folder), 7)
    assert (config.generation.temperature, config.model.lora.r) == (0.5, 4)
    assert config.reward.kind == "combined"
    assert config.evaluate.every == 0  # how it was evaluated is this command's business
    assert config.target == ("eval/win_rate", 1)


def test_the_command_line_wins(run):
    folder = run("generation.temperature=0.5", "data.limit=9")
    config = judged(
        f"run={folder}", "generation.temperature=0.7", "evaluate.prompts=3", "reward=function",
        "reward.function=a.b:c", "data=jsonl", "data.path=mine.jsonl",
    )  # fmt: skip
    assert (config.generation.temperature, config.evaluate.prompts) == (0.7, 3)
    assert config.reward == FunctionRewardConfig(kind="function", function="a.b:c")
    assert (config.data.path, config.data.held_out, config.data.limit) == ("mine.jsonl", None, None)
    assert judged(f"run={folder}", "data.held_out=other.jsonl").data.limit == 9


def test_several_temperatures_are_a_sweep(run):
    jobs = judge("-m", "stage=evaluate", f"run={run()}", "generation.temperature=0.5,1.0").jobs
    assert [job.generation.temperature for job in jobs] == [0.5, 1.0]
    assert len({job.run for job in jobs}) == 1


def test_a_folder_inside_the_run_will_do(run):
    folder = run("seed=7")
    for inside in ("adapters", "adapters/policy"):
        config = judged(f"run={folder / inside}")
        assert config.seed == 7
    assert config.run == str(folder / "adapters" / "policy")


def test_the_fresh_run_has_a_folder_of_its_own(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = run()
    before = sorted(folder.rglob("*"))
    assert judged("run=earlier").run == str(folder)
    assert sorted(folder.rglob("*")) == before


def test_a_run_cut_short_is_judged_with_a_note(run):
    summary = {"status": "interrupted", "iterations": 3, "total_iterations": 9}
    (note,) = judge("stage=evaluate", f"run={run(summary=summary)}").notes
    assert "interrupted after 3 of 9 iterations" in note
    assert "the run did not finish" in note


def test_a_finished_run_needs_no_note(run):
    assert judge("stage=evaluate", f"run={run()}").notes == []


def test_there_must_be_a_run():
    assert complaint("stage=evaluate") == "stage=evaluate needs a run to look at: give run=FOLDER"
    assert "run=nowhere is not there" in complaint("stage=evaluate", "run=nowhere")
    assert "run=(nothing) is no run: it holds no config_resolved.yaml" in complaint("stage=evaluate", "run=")


def test_a_run_that_failed_is_refused(run):
    folder = run(summary={"status": "failed", "error": "out of memory"}, holds=None)
    assert "never finished: it failed and left no adapters (out of memory)" in complaint(
        "stage=evaluate", f"run={folder}"
    )


def test_a_run_without_an_end_is_refused(run):
    told = complaint("stage=evaluate", f"run={run(summary={})}")
    assert "is a run that never finished: it has no summary.json" in told


def test_a_reward_model_gives_no_answers(run):
    folder = run("stage=reward", holds="reward")
    assert f"run={folder} holds a reward model, not a policy" in complaint("stage=evaluate", f"run={folder}")


def test_a_rival_needs_the_same_backbone(run, tmp_path):
    folder = run()
    other = tmp_path / "other"
    other.mkdir()
    values = yaml.safe_load((folder / "config_resolved.yaml").read_text())
    model = tmp_path / "wide"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "hidden_size": 4096}')
    values["model"]["path"] = str(model)
    (other / "config_resolved.yaml").write_text(yaml.safe_dump(values))
    (other / "summary.json").write_text('{"status": "finished"}')
    (other / "adapters" / "policy").mkdir(parents=True)
    (other / "adapters" / "policy" / "adapter_config.json").write_text("{}")
    told = complaint("stage=evaluate", f"run={folder}", f"evaluate.against={other}")
    assert told.startswith(
        f"evaluate.against={other} was made for another model: {model} has hidden_size=4096"
    )
    assert "evaluate.against=nowhere: there is no such folder" in complaint(
        "stage=evaluate", f"run={folder}", "evaluate.against=nowhere"
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (["run=here"], "run=here is for stage=evaluate"),
        (["evaluate.against=there"], "evaluate.against=there is for stage=evaluate: stage=ppo compares"),
        (["stage=evaluate", "run=x", "evaluate.prompt=3"], "run=x is not there"),
    ],
)
def test_what_goes_with_evaluation_alone(line, sentence):
    assert sentence in complaint(*line)


def test_a_recipe_does_not_go_with_a_run(run):
    told = complaint("stage=evaluate", f"run={run()}", "experiment=smollm2_sentiment")
    assert told == "experiment=... does not go with run=...: the run brings its own settings"


def test_an_unknown_key_is_still_told(run):
    told = complaint("stage=evaluate", f"run={run()}", "generation.temprature=1")
    assert "generation.temprature is no setting; did you mean generation.temperature?" in told


def test_train_then_evaluate(model_folders, tmp_path, monkeypatch, capsys):
    """The whole command, on a small Llama: two iterations of PPO, then its policy against the reference."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("".join(f"the soup number {number}\n" for number in range(60)))
    line = [
        f"model.path={model_folders['llama']}", "model.quantization=none", "model.lora.r=2",
        "reward=regex", "reward.pattern=e", "data=text", "data.path=prompts.txt", "data.held_out_share=0.2",
        "trainer=cpu", "debug=default", "callbacks.progress=false",
    ]  # fmt: skip
    assert cli.main(ROOT, [*line, "hydra.run.dir=trained"]) == 0
    capsys.readouterr()
    words = ["stage=evaluate", "run=trained", "evaluate.against=trained", "evaluate.bootstrap=100"]
    assert cli.main(ROOT, [*words, "evaluate.show=2", "hydra.run.dir=judged"]) == 0
    shown = capsys.readouterr().out
    assert "policy over reference  score" in shown
    assert "warning" not in shown
    report = json.loads((tmp_path / "judged" / "evaluation.json").read_text())
    assert report["win_rates"]["policy over rival"]["score"]["win_rate"] == 0.5
    assert report["prompts"] == len((tmp_path / "judged" / "evaluation.jsonl").read_text().splitlines())
    summary = json.loads((tmp_path / "judged" / "summary.json").read_text())
    assert (summary["status"], summary["objective"]) == ("finished", "eval/win_rate")
    assert summary["last"] == report["metrics"]
    assert {path.name for path in (tmp_path / "trained").iterdir()} >= {"adapters", "metrics.csv"}
    assert not (tmp_path / "trained" / "evaluation.json").exists()
