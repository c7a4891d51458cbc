"""Wrong commands, each with the sentence that the user gets, composed and judged as train.py does it."""

from pathlib import Path

import pytest

from rlhf_lightning.config.arguments import parse
from rlhf_lightning.config.composing import Command
from rlhf_lightning.config.preflight import plan
from rlhf_lightning.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def judge(line: list[str], launch: Path | None = None):
    flags = parse(line)
    name = flags.config_name or "config"
    place = {} if launch is None else {"launch": launch}
    return plan(Command(ROOT / "conf", flags.tokens, name, flags.multirun, flags.folders, **place))


def complaint(*line: str) -> str:
    with pytest.raises(UserError) as caught:
        judge(list(line))
    return str(caught.value)


# Refused by the words alone.
WORDS = [
    (["model=lama7b"], "model=lama7b is not offered; did you mean model=llama7b?"),
    (["reward=lenght"], "reward=lenght is not offered; did you mean reward=length?"),
    (["ppo=fast"], "ppo=fast is not offered; There are default, tiny"),
    (["+experiment=smollm2"], "did you mean experiment=smollm2_reward?"),
    (["model="], "model= (nothing after =) is not offered"),
    (["model"], "model needs a choice: model=gemma2_2b|"),
    (["llama7b"], "llama7b stands alone; did you mean model=llama7b?"),
    (["ppo.clip", "0.2"], "ppo.clip stands alone: settings are given as KEY=VALUE, without spaces around ="),
    (["ppo.clip=["], "ppo.clip=[ cannot be read: write lists as [a,b]"),
    (["ppo.clip={a:"], "ppo.clip={a: cannot be read"),
    (["=0.2"], "=0.2 has no key: settings are given as KEY=VALUE"),
    (["--ppo.clip=0.2"], "--ppo.clip=0.2 is no option: settings are given without dashes, ppo.clip=0.2"),
    (["-ppo.clip=0.2"], "-ppo.clip=0.2 is no option: settings are given without dashes, ppo.clip=0.2"),
    (["--seed=3"], "--seed=3 is no option: settings are given without dashes, seed=3"),
    (["--multrun"], "--multrun is no option; did you mean --multirun?"),
    (["--zzz"], "--zzz is no option; see python train.py --help"),
    (["--cfg", "jbo"], "argument --cfg/-c: invalid choice: 'jbo'"),
    (["--package", "ppo"], "--package ppo goes with --cfg only"),
    (["--resolve"], "--resolve goes with --cfg only"),
    (["--cfg", "job", "-m"], "-m runs a sweep and --cfg runs nothing: give one of them"),
    (["--config-dir", "nowhere"], "--config-dir nowhere is no folder"),
    (["--config-path", "elsewhere"], "--config-path and --experimental-rerun are not supported"),
    (["~ppo.clp"], "~ppo.clp takes away a setting that is not there; did you mean ~ppo.clip?"),
    (["ppo={clip:0.3}"], "ppo={...} is no choice: name single keys, such as ppo.NAME=VALUE"),
    (["data=[tiny,cvs]"], "data=cvs is not offered; did you mean data=csv?"),
    (["-m", "model=tiny,lama7b"], "model=lama7b is not offered; did you mean model=llama7b?"),
    (["resume=nowhere"], "resume=nowhere is not there"),
    (["resume="], "is no run: it holds no config_resolved.yaml"),
]

# Refused by the schema or by a rule between settings, after composition.
VALUES = [
    (["ppo.clp=0.2"], "ppo.clp is no setting; did you mean ppo.clip?"),
    (["+ppo.clp=0.2"], "ppo.clp is no setting; did you mean ppo.clip?"),
    (["++ppo.clp=0.2"], "ppo.clp is no setting; did you mean ppo.clip?"),
    (["+ppo.cliprnge=0.1"], "ppo.cliprnge is no setting; did you mean ppo.clip"),
    (["modle=llama7b"], "modle is no setting; did you mean model?"),
    (["clip=0.2"], "clip is no setting; did you mean ppo.clip?"),
    (["trainer.accumulate_grad_batches=4"], "no setting; did you mean ppo.micro_batch_size?"),
    (["zzzzzz=1"], "zzzzzz is no setting; see python train.py --help"),
    (["ppo.clip="], "ppo.clip must be a number above 0 and below 1, not empty (epsilon"),
    (["ppo.clip=1.5"], "ppo.clip must be a number above 0 and below 1, not 1.5"),
    (["ppo.clip=true"], "ppo.clip must be a number above 0 and below 1, not true"),
    (["ppo.clip=null"], "ppo.clip must be a number above 0 and below 1, not null"),
    (["ppo.lr=fast"], "ppo.lr must be a number at least 0, not 'fast'"),
    (["ppo.lr=nan"], "ppo.lr must be a number at least 0, not nan"),
    (["ppo.epochs=2.5"], "ppo.epochs must be a whole number at least 1, not 2.5"),
    (["ppo.kl_estimator=k4"], "ppo.kl_estimator must be k1, k2 or k3, not 'k4'"),
    (["ppo.whiten_advantages=perhaps"], "ppo.whiten_advantages must be true or false, not 'perhaps'"),
    (["model.path=null"], "model.path must be a text, not null"),
    (["model.lora.target_modules=q_proj"], "must be a list of texts, [a,b] or all-linear, not 'q_proj'"),
    (["++model.lora=8"], "model.lora must be a section: name a key inside it, model.lora.NAME=VALUE, not 8"),
    (["seed=-1"], "seed must be a whole number at least 0 and below 4294967296, not -1"),
    (["generation.stop=[1]"], "generation.stop must be a list of texts, [a,b], not [1]"),
    (["reward=function"], "reward.function is required (package.module:name): give reward.function=VALUE"),
    (["reward=function", "reward.function=vader"], "must be of the form package.module:name, not 'vader'"),
    (["reward=regex", "reward.pattern='('"], "reward.pattern must be a Python regular expression (missing )"),
    (
        ["reward=learned", "reward.target=3"],
        "reward.target is no setting here: reward of this kind has kind, path, batch_size",
    ),
    (
        ["reward.kind=lenght"],
        "reward.kind must be one of learned, classifier, function, length, regex, http, combined",
    ),
    (
        ["reward=combined", "reward.parts.liked.weight=x"],
        "reward.parts.liked.weight must be a number, not 'x'",
    ),
    (["data=csv"], "data.path is required (file, folder or hub id of prompts"),
    (["experiment=smollm2_sentiment"], "data.path is required"),
    (
        ["ppo=default", "ppo.minibatch_size=48"],
        "ppo.minibatch_size=48 must divide the answers of one iteration exactly",
    ),
    (["ppo.micro_batch_size=5"], "ppo.micro_batch_size=5 must divide ppo.minibatch_size=32 exactly"),
    (
        ["model.rollout_weights=packed", "model.dtype=float32"],
        "model.rollout_weights=packed is for products in bfloat16, not model.dtype=float32",
    ),
    (
        ["model.rollout_weights=packed", "model.dtype=bfloat16", "trainer.accelerator=gpu"],
        "model.rollout_weights=packed is a CPU's layout, and trainer.accelerator=gpu is none",
    ),
    (["model.lora.dropout=0.1"], "model.lora.dropout must be 0 for stage=ppo, not 0.1"),
    (["generation.top_k=50"], "generation.top_k must be 0, not 50"),
    (["generation.top_p=0.9"], "generation.top_p must be 1, not 0.9"),
    (
        ["generation.ignore_eos=true", "ppo.missing_eos_penalty=1"],
        "ppo.missing_eos_penalty=1.0 would be taken off every score: with generation.ignore_eos=true no",
    ),
    (["generation.ignore_eos=true", "doctor=true"], "doctor=true examines how answers end, but with"),
    (["trainer.devices=2"], "training on several devices is not supported yet"),
    (["ppo.clip_high=0.1"], "ppo.clip_high=0.1 must be at least ppo.clip=0.2"),
    (["ppo.dual_clip=1.1"], "ppo.dual_clip=1.1 must be above 1 + the upper clip = 1.2"),
    (
        ["ppo.kl_in=loss", "ppo.kl_estimator=k1"],
        "ppo.kl_in=loss does not go with ppo.kl_estimator=k1: the gradient of k1 averages to 0",
    ),
    (["ppo.kl_target=6", "ppo.beta=0"], "ppo.kl_target=6.0 needs ppo.beta above 0"),
    (
        ["ppo=default", "ppo.iterations=2", "ppo.warmup=900"],
        "ppo.warmup=900 must be at most the 16 optimizer steps of the run",
    ),
    (["ppo.critic_warmup=900"], "ppo.critic_warmup=900 must be below ppo.iterations="),
    (
        ["advantage=rloo"],
        "advantage.kind=rloo needs ppo.samples_per_prompt of at least 2, not 1: it compares the answers",
    ),
    (["advantage=dr_grpo"], "advantage.kind=grpo needs ppo.samples_per_prompt of at least 2, not 1"),
    (
        ["advantage=reinforce", "ppo.critic_warmup=1"],
        "ppo.critic_warmup=1 needs a critic, and advantage.kind=reinforce has none: take advantage=gae",
    ),
    (
        ["advantage=rloo", "ppo.samples_per_prompt=4", "ppo.bootstrap_truncated=true"],
        "ppo.bootstrap_truncated=true needs a critic, and advantage.kind=rloo has none",
    ),
    (["advantage=rlo"], "advantage=rlo is not offered; did you mean advantage=rloo?"),
    (["advantage=reinforce", "advantage.decay=1"], "advantage.decay must be a number at least 0 and below 1"),
    (["ppo.ratio=response"], "ppo.ratio must be token or sequence, not 'response'"),
    (["trainer=cpu", "model.dtype=float16"], "model.dtype=float16 does not go with trainer.accelerator=cpu"),
    (["model.attention=flash_attention_2"], "needs a GPU and model.dtype=bfloat16 or float16"),
    (["model=gpt2", "reward=learned"], "reward.path=tiny fits only model=tiny, not model.path="),
    (["model=gpt2", "reward=combined"], "reward.parts.liked.reward.path=tiny fits only model=tiny"),
    (["objective=objectve/score"], "not 'objectve/score'; did you mean objective/score?"),
    (["objective=score"], "objective must name a metric as family/name, not 'score'"),
    (["ppo.clip=0.1,0.2"], "ppo.clip=0.1,0.2 gives several values: add -m to run each of them"),
    (["ppo.lr=${ppo.rate}"], "ppo.lr cannot be resolved: Interpolation key 'ppo.rate' not found"),
    (["data.path=${oc.env:HF_TOKEN}"], "data.path must not take ${oc.env:HF_TOKEN}"),
    (["--config-name", "confg"], "Cannot find primary config 'confg'"),
    (["-m", "seed=interval(0,1)"], "asks for another sweeper: the one here takes lists, a,b,c"),
    (["-m", "resume=here"], "resume=here is not there"),
]


@pytest.mark.parametrize(("line", "sentence"), WORDS, ids=[" ".join(line) for line, _ in WORDS])
def test_a_wrong_word_gets_its_sentence(line, sentence):
    told = complaint(*line)
    assert sentence in told
    assert "\n" not in told


@pytest.mark.parametrize(("line", "sentence"), VALUES, ids=[" ".join(line) for line, _ in VALUES])
def test_a_wrong_value_gets_its_sentence(line, sentence):
    told = complaint(*line)
    assert sentence in told
    assert "\n" not in told


def test_all_faults_are_told_at_once_and_none_twice():
    told = complaint(
        "ppo.clip=5", "ppo.clp=1", "ppo.minibatch_size=48", "model.dtype=int8", "trainer.devices=2"
    )
    lines = told.splitlines()
    assert lines[0] == "6 faults in the configuration:"
    assert {line.split()[1].partition("=")[0] for line in lines[1:]} == {
        "ppo.clip",
        "model.dtype",
        "ppo.clp",
        "ppo.minibatch_size",
        "ppo.micro_batch_size",
        "trainer.devices",
    }
    assert len(lines) == 7


def test_a_bad_word_hides_no_unknown_key():
    told = complaint("model=lama7b", "+ppo.clp=0.2")
    assert "model=lama7b is not offered" in told
    assert "ppo.clp is no setting" in told


def test_a_sweep_is_refused_before_its_first_job():
    told = complaint("-m", "ppo.clip=0.1,5", "reward=length")
    assert told.startswith("nothing was started: 1 of 2 jobs of this sweep have faults\n")
    assert "ppo.clip=5 reward=length: ppo.clip must be a number above 0 and below 1, not 5" in told


def test_a_fault_of_every_job_is_told_once():
    assert complaint("-m", "ppo.clp=0.1,0.2") == "ppo.clp is no setting; did you mean ppo.clip?"


@pytest.mark.parametrize("form", ["1e-5", "1.0e-5", "1E-5", "0.00001", "'1e-5'"])
def test_a_small_number_in_any_form_is_a_float(form):
    config = judge([f"ppo.lr={form}"]).jobs[0]
    assert type(config.ppo.lr) is float
    assert config.ppo.lr == 1e-5


def test_a_sweep_over_small_numbers_gives_floats():
    rates = [job.ppo.lr for job in judge(["-m", "ppo.lr=1e-5,3e-5"]).jobs]
    assert rates == [1e-5, 3e-5]
    assert all(type(rate) is float for rate in rates)


def test_the_three_sentences_of_the_design():
    plain = judge([]).jobs[0]
    assert (plain.model.path, plain.data.path) == ("tiny", "tiny")
    assert plain.reward.kind in ("learned", "combined")  # the embedded reward model, alone or watched
    assert plain.model.dtype == "float32"

    real = judge(["model=llama7b", "ppo.clip=0.3"])
    config = real.jobs[0]
    assert config.model.path == "meta-llama/Llama-2-7b-hf"
    assert (config.ppo.clip, config.ppo.lr, config.ppo.iterations) == (0.3, 1e-5, 100)
    assert config.reward.kind == "length"
    assert "choose yours with reward=" in real.notes[0]

    swept = judge(["-m", "ppo.beta=0.02,0.05,0.1", "ppo.clip=0.1,0.2,0.3"])
    assert swept.multirun
    pairs = [(job.ppo.beta, job.ppo.clip) for job in swept.jobs]
    assert pairs == [(b, c) for b in (0.02, 0.05, 0.1) for c in (0.1, 0.2, 0.3)]


def test_what_the_user_names_wins_over_what_a_model_brings():
    assert judge(["ppo=default"]).jobs[0].ppo.lr == 1e-5
    assert judge(["ppo.lr=0.5", "reward=length"]).jobs[0].ppo.lr == 0.5
    assert judge(["model=gpt2", "reward=regex", "reward.pattern=a"]).notes == []


def test_a_known_key_is_taken_with_or_without_plus():
    assert judge(["+ppo.clip=0.3"]).jobs[0].ppo.clip == 0.3
    assert judge(["logger=none", "logger.wandb.mode=online"]).jobs[0].logger.wandb.mode == "online"


def test_a_used_run_folder_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    told = complaint(f"hydra.run.dir={tmp_path}")
    assert told.startswith(f"hydra.run.dir={tmp_path} holds files, and a run never writes over them")
    assert told.endswith("or empty this one")
    (tmp_path / "config_resolved.yaml").write_text("seed: 0")
    assert complaint(f"hydra.run.dir={tmp_path}").endswith(f"or continue it with resume={tmp_path}")
    assert "hydra.sweep.dir" in complaint("-m", "seed=1,2", f"hydra.sweep.dir={tmp_path}")


def test_a_path_below_home_is_taken_as_typed(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "prompts.txt").write_text("the soup\n")
    words = ["data=text", "data.path=~/prompts.txt", "model.path=~/models/mine", "reward=length"]
    (job,) = judge(words).jobs
    assert job.data.path == str(tmp_path / "prompts.txt")
    assert job.model.path == str(tmp_path / "models" / "mine")
    sweep = judge(["-m", "data=text", "data.path=~/prompts.txt,~/prompts.txt", "reward=length"]).jobs
    assert [job.data.path for job in sweep] == [str(tmp_path / "prompts.txt")] * 2
    judged = judge(["hydra.run.dir=~/my run", "generation.stop=[~/a,b]", "reward=length"])
    assert judged.jobs[0].generation.stop == ["~/a", "b"]
    assert f"hydra.run.dir='{tmp_path}/my run'" in judged.command.tokens
    assert complaint("resume=~/nowhere").startswith("resume=~/nowhere is not there")


def test_a_config_file_that_is_no_yaml_is_one_sentence(tmp_path, capsys):
    import shutil

    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    shutil.copytree(ROOT / "sweeps", tmp_path / "sweeps")
    (tmp_path / "conf" / "reward" / "mine.yaml").write_text("kind: length\ntarget: {a: ???}\n")
    from rlhf_lightning.config.cli import main

    assert main(tmp_path, ["reward=mine"]) == 1
    said = capsys.readouterr().err
    assert "mine.yaml, line 2" in said and "no valid YAML" in said and "Traceback" not in said


def test_hydra_prints_a_config_with_a_path_below_home(monkeypatch, tmp_path, capsys):
    from rlhf_lightning.config.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(ROOT, ["--cfg", "job", "data=text", "data.path=~/rows.txt", "reward=length"]) == 0
    assert "path: ~/rows.txt" in capsys.readouterr().out
