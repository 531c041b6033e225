"""What the questions accept and refuse, and what any set of answers renders."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import tomllib
import typing
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from copier import run_copy, run_update
from jinja2 import FileSystemLoader, StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from packaging.requirements import Requirement

from tests import startup_schema
from trainer.config import settings
from trainer.config.load import load_config, sections_of
from trainer.config.settings import CONFIG_FILE, FILE_SECTIONS, STARTUP_FILE, Config
from trainer.interval import compute_interval
from trainer.outcome import ConfigError

ROOT = Path(__file__).parent.parent
TEMPLATE = ROOT / "template"
COPIER_YML = yaml.safe_load((ROOT / "copier.yml").read_text())
QUESTIONS = {key: value for key, value in COPIER_YML.items() if not key.startswith("_")}
ASKED = {key: value for key, value in QUESTIONS.items() if value.get("when", True) is not False}
SCHEMA = json.loads(startup_schema.FILE.read_text())
SECTIONS = sections_of(Config.task)

DEPLOY_FILES = {
    "nexgpu": {"nexgpu.json", "vast.json", "runpod.json", "compose.yaml", "Dockerfile"},
    "vm": {"cloud-init.yaml", "train.service", "aws-launch-template.yaml"},
    "slurm": {"train.sbatch"},
    "kubernetes": {"k8s", "Dockerfile"},
    "skypilot": {"sky.yaml"},
    "dstack": {"train.dstack.yml"},
}

# Pairs of answers that meet at least once: every provider, target, layout, size and policy.
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "nexgpu": {"provider": "nexgpu", "parallelism": "hsdp", "nodes": 2, "model_size": "350m"},
    "aws": {"provider": "aws", "deploy_targets": ["vm", "skypilot"], "model_size": "1b", "on_gpu_count_change": "hold"},
    "images": {"task": "image_classifier", "steps": 300},
    "gcp": {"provider": "gcp", "deploy_targets": ["vm", "kubernetes"], "parallelism": "ddp", "model_size": "125m"},
    "azure": {"provider": "azure", "deploy_targets": ["vm"], "gpus": 3, "min_gpus": 2, "on_gpu_count_change": "fail"},
    "runpod": {"provider": "runpod", "deploy_targets": ["nexgpu", "dstack"], "model_size": "350m"},
    "vast": {"provider": "vast", "deploy_targets": ["nexgpu", "skypilot"], "parallelism": "ddp", "mtbi": "20h"},
    "slurm": {"provider": "slurm", "deploy_targets": ["slurm"], "nodes": 4, "parallelism": "hsdp", "model_size": "1b"},
    "kubernetes": {"provider": "kubernetes", "deploy_targets": ["kubernetes"], "nodes": 2, "save_stall": "0"},
    "everything": {
        "provider": "aws",
        "deploy_targets": list(DEPLOY_FILES),
        "image": "registry.example/team/train@sha256:" + "0f" * 32,
        "step_time": "0.01ms",
        "save_time": "1ms",
        "steps": 7,
    },
    "nothing": {"deploy_targets": [], "volume_mount": "/mnt/disk", "checkpoint_dir": "runs/of mine", "steps": 1},
}


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
    run = subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True)
    return run.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working tree as a clean git repo of one commit: what Copier clones."""
    copy = tmp_path_factory.mktemp("source") / "product"
    copy.mkdir()
    shutil.copy(ROOT / "copier.yml", copy)
    shutil.copytree(TEMPLATE, copy / "template", ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
    git(copy, "init", "--quiet")
    git(copy, "add", "--all")
    git(copy, "commit", "--quiet", "--message", "template")
    return copy


Render = Callable[..., Path]


@pytest.fixture(scope="module")
def render(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Render:
    """Render a project from answers, like `scaffold new --defaults`, and return its folder."""

    def render(folder: str = "demo", **answers: Any) -> Path:
        target = tmp_path_factory.mktemp("rendered") / folder
        run_copy(str(source), target, data=answers, defaults=True, quiet=True, vcs_ref="HEAD")
        return target

    return render


@pytest.fixture(scope="module")
def projects(render: Render) -> dict[str, Path]:
    """Every variant, rendered once."""
    return {name: render(**answers) for name, answers in VARIANTS.items()}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, projects: dict[str, Path]) -> tuple[Path, dict[str, Any]]:
    """A rendered project and all of its answers."""
    project = projects[request.param]
    return project, yaml.safe_load((project / ".copier-answers.yml").read_text())


def files(project: Path) -> Iterator[Path]:
    return (path for path in project.rglob("*") if path.is_file() and ".git" not in path.relative_to(project).parts)


# ---------------------------------------------------------------------------------------------------------------------
# Every variant


def test_answers_reach_the_settings(variant: tuple[Path, dict[str, Any]]) -> None:
    project, answers = variant
    config = load_config(project=project)
    assert config.run.name == answers["project_name"]
    assert config.run.provider == answers["provider"]
    assert config.image.ref == answers["image"]
    assert config.image.allow_tag == ("@sha256:" not in answers["image"])
    assert (config.gpu.count, config.gpu.min_count) == (answers["gpus"], answers["min_gpus"])
    assert config.gpu.on_count_change == answers["on_gpu_count_change"]
    assert config.nodes.count == answers["nodes"]
    assert (config.volume.mount, config.checkpoint.dir) == (answers["volume_mount"], answers["checkpoint_dir"])
    assert config.reclaim.grace_s == answers["grace_seconds"]
    assert config.parallel.strategy == answers["parallelism"]
    assert (config.data.global_batch, config.data.micro_batch) == (answers["global_batch"], answers["micro_batch"])
    assert (config.task, config.train.steps) == (answers["task"], answers["steps"])
    if config.task == "language_model":
        assert config.data.sequence_length == answers["sequence_length"]
    assert config.optim.warmup_steps <= config.train.steps
    assert config.checkpoint.keep_last == answers["keep_last"]


def test_the_saves_come_at_the_calculated_interval(variant: tuple[Path, dict[str, Any]]) -> None:
    checkpoint = load_config(project=variant[0]).checkpoint
    interval = compute_interval(**checkpoint.figures)
    assert checkpoint.every_steps == interval.save_interval_steps


def test_the_yaml_files_name_every_setting_once(variant: tuple[Path, dict[str, Any]]) -> None:
    kinds = sections_of(variant[1]["task"])
    for file, sections in FILE_SECTIONS.items():
        tree = yaml.safe_load((variant[0] / file).read_text())
        assert list(tree) == (["task", *sections] if file == CONFIG_FILE else list(sections))
        for section in sections:
            fields = [each.name for each in dataclasses.fields(kinds[section])]
            if section == "data":  # its own keys of the task come first, as they matter most
                assert sorted(tree[section]) == sorted(fields)
            else:
                assert list(tree[section]) == fields


def test_the_startup_config_keeps_its_schema(variant: tuple[Path, dict[str, Any]]) -> None:
    jsonschema.validate(yaml.safe_load((variant[0] / STARTUP_FILE).read_text()), SCHEMA)


def test_the_deploy_targets_decide_which_formats_are_there(variant: tuple[Path, dict[str, Any]]) -> None:
    project, answers = variant
    there = {path.name for path in (project / "deploy").iterdir()} if (project / "deploy").is_dir() else set()
    shared = {"README.md", "until-done.sh"}
    assert there - shared == set().union(*(DEPLOY_FILES[target] for target in answers["deploy_targets"]))
    assert ("README.md" in there) == bool(answers["deploy_targets"])


def test_shell_scripts_are_sound(variant: tuple[Path, dict[str, Any]]) -> None:
    scripts = [path for path in files(variant[0]) if path.read_bytes().startswith(b"#!") and path.suffix != ".py"]
    assert {"restart.sh", "onstart.sh"} <= {path.name for path in scripts}
    checked = subprocess.run(["shellcheck", "--severity=style", *scripts], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)


def test_data_files_parse_and_nothing_of_jinja_is_left(variant: tuple[Path, dict[str, Any]]) -> None:
    for path in files(variant[0]):
        relative = path.relative_to(variant[0])
        assert "{" not in str(relative)
        assert path.suffix != ".jinja"
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix in (".yaml", ".yml") and relative.name != "aws-launch-template.yaml":  # has tags of its own
            list(yaml.safe_load_all(path.read_text()))
        elif path.suffix == ".toml":
            tomllib.loads(path.read_text())
        if (TEMPLATE / f"{relative}.jinja").is_file():
            text = path.read_text().replace("{{ RUNPOD_SECRET", "")
            assert not re.search(r"\{%|\{#|%\}|#\}|(?<!\$)\{\{ ", text), path
            assert text.endswith("\n") and not text.startswith("\n") and "\n\n\n" not in text, path


def test_git_tracks_what_is_rendered_and_ignores_none_of_it(variant: tuple[Path, dict[str, Any]]) -> None:
    project = variant[0]
    if not (project / ".git").exists():
        git(project, "init", "--quiet")
    git(project, "add", "--all")
    rendered = {str(path.relative_to(project)) for path in files(project)}
    assert set(git(project, "ls-files", "-z").split("\0")) - {""} == rendered


def test_what_a_run_leaves_behind_is_ignored(variant: tuple[Path, dict[str, Any]]) -> None:
    project, answers = variant
    if not (project / ".git").exists():
        git(project, "init", "--quiet")
    left = [
        ".venv/bin/python",
        "trainer/__pycache__/cli.pyc",
        "checkpoints/demo/ledger.jsonl",
        "drill/x",
        "report.png",
        "model.safetensors",
    ]
    if not answers["checkpoint_dir"].startswith("/"):
        left.append(f"{answers['checkpoint_dir']}/demo/ledger.jsonl")
    assert len(git(project, "check-ignore", *left).splitlines()) == len(left)


def test_the_rendered_repo_passes_its_own_lint(projects: dict[str, Path]) -> None:
    checked = subprocess.run(
        ["ruff", "check", "--no-cache", "."], cwd=projects["defaults"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def test_python_is_rendered_byte_for_byte(source: Path, projects: dict[str, Path]) -> None:
    modules = list((source / "template").rglob("*.py"))
    assert modules
    for path in modules:
        variant = "images" if "image_classifier" in path.parts else "everything"
        assert (projects[variant] / path.relative_to(source / "template")).read_bytes() == path.read_bytes()


def test_scripts_can_be_executed(projects: dict[str, Path]) -> None:
    for script in ("restart.sh", "startup/onstart.sh"):
        assert (projects["defaults"] / script).stat().st_mode & 0o111


def test_options_switched_later_add_and_remove_their_files(source: Path, render: Render) -> None:
    project = render(deploy_targets=["slurm"], description=HOSTILE[2])
    git(project, "init", "--quiet")
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message", "first")
    run_update(project, data={"deploy_targets": ["vm"]}, overwrite=True, quiet=True, vcs_ref="HEAD")
    assert not (project / "deploy/train.sbatch").exists()
    assert (project / "deploy/train.service").exists()
    assert yaml.safe_load((project / ".copier-answers.yml").read_text())["description"] == HOSTILE[2]


# ---------------------------------------------------------------------------------------------------------------------
# Answers are data

HOSTILE = [
    """it's "quoted" and 'that' too""",
    "$(touch pwned) `touch pwned` ${HOME} $HOME",
    "{{ 7 * 7 }} {% raw %} {# x #}",
    "back\\slash \\n \\u0041 %n %% #comment: - [x] & *y !z @w",
    "ünïcode 🎛️ 漢字 «quoted» <b>&amp;</b>",
    "--- key: value, {a: b} | > ? ~ null",
    " leading and trailing ",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_answers_survive_byte_for_byte(text: str, render: Render) -> None:
    project = render(description=text, checkpoint_dir=f"/data/{text}", deploy_targets=list(DEPLOY_FILES))
    answers = yaml.safe_load((project / ".copier-answers.yml").read_text())
    assert (answers["description"], answers["checkpoint_dir"]) == (text, f"/data/{text}")
    assert tomllib.loads((project / "pyproject.toml").read_text())["project"]["description"] == text
    assert load_config(project=project).checkpoint.dir == f"/data/{text}"
    for path in files(project):
        if path.suffix in (".yaml", ".yml") and path.name != "aws-launch-template.yaml":
            list(yaml.safe_load_all(path.read_text()))
        elif path.suffix == ".json":
            json.loads(path.read_text())
    assert not list(project.rglob("pwned"))


def complaint(question: str, **answers: Any) -> str:
    """What the validator of a question says of its answer, with the other answers at hand."""
    environment = SandboxedEnvironment(
        loader=FileSystemLoader(ROOT),
        extensions=["jinja2_ansible_filters.AnsibleCoreFiltersExtension"],
        undefined=StrictUndefined,
    )
    return environment.from_string(QUESTIONS[question]["validator"]).render(answers).strip()


CONTROL = ["a\nb", "a\rb", "a\tb", "a\0b", "a\x1bb", "a\x7fb", "a\x85b", "a\u2028b", "a\u202eb", "\ufeffa", "a\ud800b"]
INTERVAL = {"mtbi": "4h", "step_time": "800ms", "save_time": "30s", "save_stall": "3s", "restart_time": "5m"}
REFUSED: list[tuple[str, Any, dict[str, Any]]] = [
    *(("description", text, {}) for text in [*CONTROL, "", "  ", "x" * 301]),
    *(("checkpoint_dir", text, {}) for text in [*CONTROL, "", ".", "./", "trainer", "tasks/x", "./startup/x", ".git"]),
    *(
        ("project_name", text, {})
        for text in ["", "A", "1a", "a_b", "a b", "a-", "a\n", "../x", "x" * 41, "ä", "$(id)"]
    ),
    *(("volume_mount", text, {}) for text in ["data", "/", "/a b", "/a/../b", "/a\n", "/a'b", "//a", "/a/", "/$HOME"]),
    *(("image", text, {}) for text in ["", "a b", "a@sha256:12", "a@md5:" + "0" * 64, "a\n", "$(id)", "a;b", "-x"]),
    *(("gpus", number, {}) for number in (0, -1, 1025)),
    *(("min_gpus", number, {"gpus": 4}) for number in (0, 5)),
    *(("nodes", number, {}) for number in (0, -1)),
    *(("grace_seconds", number, {}) for number in (-1, 86401)),
    *((key, 0, {}) for key in ("global_batch", "micro_batch", "sequence_length", "steps", "keep_last")),
    *(
        (key, text, {})
        for key in ("mtbi", "step_time", "save_time")
        for text in ("", "0", "-1s", "4 hours", "nan", "1s\n2")
    ),
    *((key, text, {}) for key in ("save_stall", "restart_time") for text in ("", "soon", "-1")),
    *(("badput_target", text, INTERVAL) for text in ("", "0", "5", "1", "100%", "0%", "much")),
    ("badput_target", "5%", INTERVAL | {"mtbi": "5m"}),
    ("badput_target", "5%", INTERVAL | {"mtbi": "14m"}),
    ("badput_target", "0.1%", INTERVAL),
]


@pytest.mark.parametrize(("question", "answer", "others"), REFUSED)
def test_wrong_answers_are_refused_in_one_line(question: str, answer: Any, others: dict[str, Any]) -> None:
    said = complaint(question, **{question: answer}, **others)
    assert said
    assert "\n" not in said


ACCEPTED: list[tuple[str, Any, dict[str, Any]]] = [
    ("project_name", "a", {}),
    ("project_name", "my-run-2", {}),
    ("volume_mount", "", {}),
    ("volume_mount", "/mnt/disks/fast_1.0-x", {}),
    ("checkpoint_dir", "~/runs", {}),
    ("checkpoint_dir", "../runs", {}),
    ("checkpoint_dir", "/mnt/x y", {}),
    ("image", "ghcr.io/a/b:1.0@sha256:" + "ab" * 32, {}),
    ("image", "localhost:5000/train:latest", {}),
    ("min_gpus", 4, {"gpus": 4}),
    ("grace_seconds", 0, {}),
    ("restart_time", "0", {}),
    ("mtbi", "1d12h", {}),
    ("mtbi", 90, {}),
    ("badput_target", "0.05", INTERVAL),
]


@pytest.mark.parametrize(("question", "answer", "others"), ACCEPTED)
def test_right_answers_are_accepted(question: str, answer: Any, others: dict[str, Any]) -> None:
    assert complaint(question, **{question: answer}, **others) == ""


def test_a_refusal_reaches_the_user_and_nothing_is_written(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one of these would have to change: MTBI 15m4s or more") as refused:
        run_copy(str(source), tmp_path / "x", data={"mtbi": "14m"}, defaults=True, quiet=True, vcs_ref="HEAD")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("folder", ["My Run", "run_2.0", "2024", "--", "x" * 60, "ünï"])
def test_the_name_of_any_folder_makes_a_name(folder: str) -> None:
    environment = SandboxedEnvironment(
        loader=FileSystemLoader(ROOT), extensions=["jinja2_ansible_filters.AnsibleCoreFiltersExtension"]
    )
    module: Any = environment.get_template("template/.macros/quote.jinja").module
    name = module.slug(folder)
    assert complaint("project_name", project_name=name) == "", name


def test_the_interval_cannot_be_set_by_an_answer(render: Render) -> None:
    project = render(save_interval_steps=5)
    assert load_config(project=project).checkpoint.every_steps == 367
    assert "save_interval_steps" not in (project / ".copier-answers.yml").read_text()


@pytest.mark.parametrize("change", [{"mtbi": "14m"}, {"gpus": 2}])
def test_an_update_that_makes_answers_impossible_fails_and_changes_nothing(
    change: dict[str, Any], render: Render, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = render(gpus=8, min_gpus=4)
    git(project, "init", "--quiet")
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message", "first")
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: PTH123, SIM115
    with pytest.raises(Exception, match=r"nteractive|would have to change|between 1 and the"):
        run_update(project, data=change, overwrite=True, quiet=True, vcs_ref="HEAD")
    assert git(project, "status", "--porcelain") == ""


# ---------------------------------------------------------------------------------------------------------------------
# The files behind it


def test_copier_yml_needs_no_trust_and_uses_known_keys_only() -> None:
    known = {"_min_copier_version", "_subdirectory", "_envops", "_exclude", "_skip_if_exists"}
    assert {key for key in COPIER_YML if key.startswith("_")} == known | {
        "_message_after_copy",
        "_message_after_update",
    }
    for key, question in ASKED.items():
        assert set(question) <= {"type", "help", "choices", "multiselect", "default", "validator", "ask", "when"}, key
        assert {"type", "help", "default", "ask"} <= set(question), key
        assert f"{key} is undefined" in question["ask"]
        assert "validator" in question or "choices" in question, key
    for key in QUESTIONS.keys() - ASKED.keys():
        assert set(QUESTIONS[key]) == {"type", "when", "default"}, key


def test_the_providers_are_those_of_the_settings() -> None:
    allowed = {
        "provider": settings.RunConfig,
        "on_gpu_count_change": settings.GpuConfig,
        "parallelism": settings.ParallelConfig,
    }
    fields = {"provider": "provider", "on_gpu_count_change": "on_count_change", "parallelism": "strategy"}
    for question, kind in allowed.items():
        values = typing.get_args(typing.get_type_hints(kind)[fields[question]])
        assert list(QUESTIONS[question]["choices"].values()) == list(values)


def test_git_ignores_no_file_of_the_template() -> None:
    ignored = git(ROOT, "ls-files", "--others", "--ignored", "--exclude-standard", "template").splitlines()
    assert [path for path in ignored if not re.search(r"__pycache__/|_cache/|[.]hypothesis/", path)] == []


def test_the_schema_is_that_of_the_dataclasses() -> None:
    committed = startup_schema.FILE.read_text()
    assert committed == startup_schema.written(), "write it anew: python -m tests.startup_schema"


WRONG: dict[str, list[Any]] = {
    "run.name": ["a/b", "-a", "x" * 101],
    "image.ref": ["a:b", "a@sha256:0"],
    "gpu.count": [0],
    "gpu.min_count": [0],
    "nodes.count": [0],
    "nodes.port": [0, 65536],
    "volume.mount": ["data"],
    "checkpoint.dir": [""],
    **{f"checkpoint.{name}": [0] for name in ("every_steps", "keep_last", "max_failed_saves")},
    **{f"checkpoint.{name}": [-1] for name in ("keep_every_steps", "save_stall_s", "restart_time_s")},
    **{f"checkpoint.{name}": [0] for name in ("deadline_s", "mtbi_s", "step_time_s", "save_time_s")},
    "checkpoint.badput_target": [0, 1],
    "reclaim.grace_s": [-1],
    "reclaim.notice": ["sometimes", "file:", "command:"],
    "restart.max_crash_restarts": [-1],
    "restart.backoff_s": [-1],
    "restart.exit_reclaimed": [0, 78, 256],
    "restart.stuck_after_s": [0],
    "gpu.on_count_change": ["maybe"],
    "checkpoint.nothing": [1],
    "nothing.at_all": [1],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_schema_and_settings_refuse_the_same_values(key: str, value: Any, tmp_path: Path) -> None:
    section, name = key.split(".")
    tree = {section: {name: value}}
    (tmp_path / "startup").mkdir()
    (tmp_path / STARTUP_FILE).write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError):
        load_config(project=tmp_path)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree, SCHEMA)


def test_each_limit_of_the_schema_has_a_wrong_value_above() -> None:
    limits = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern", "not"}
    for section, schema in SCHEMA["properties"].items():
        for name, found in schema["properties"].items():
            assert not limits & set(found) or f"{section}.{name}" in WRONG, f"{section}.{name}"


# ---------------------------------------------------------------------------------------------------------------------
# The pins


def pins() -> dict[str, tuple[str, list[str]]]:
    """The pins of startup/requirements.txt: name to version and hashes."""
    text = (TEMPLATE / "startup/requirements.txt").read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            requirement, *hashes = line.split("--hash=")
            parsed = Requirement(requirement.strip())
            (specifier,) = parsed.specifier
            assert specifier.operator == "==", line
            found[normal(parsed.name)] = (specifier.version, [each.strip() for each in hashes])
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted(project: Path) -> list[Requirement]:
    tree = tomllib.loads((project / "pyproject.toml").read_text())
    return [Requirement(text) for text in [*tree["project"]["dependencies"], *tree["dependency-groups"]["dev"]]]


def test_torch_is_pinned_exactly_and_everything_else_with_hashes() -> None:
    lines = (TEMPLATE / "startup/requirements.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("torch")] == ["torch==2.13.0"]
    assert not [line for line in lines if line.startswith("-")], "an index or an option of pip's"
    for name, (_, hashes) in pins().items():
        assert name == "torch" or hashes, name
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), name


def test_the_pins_are_what_pyproject_asks_for(projects: dict[str, Path]) -> None:
    pinned = pins()
    for requirement in wanted(projects["defaults"]):
        assert pinned[normal(requirement.name)][0] in requirement.specifier


def test_no_package_is_left_out_of_the_pins(projects: dict[str, Path]) -> None:
    pinned, seen = pins(), set()
    left = wanted(projects["defaults"])
    brought_by_torch = re.compile(r"nvidia-|cuda-|triton")  # which of them depends on its build
    while left:
        requirement = left.pop()
        name = normal(requirement.name)
        if name in seen or brought_by_torch.match(name):
            continue
        seen.add(name)
        assert name in pinned, name
        for text in metadata.requires(name) or []:
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                left.append(needed)


def test_the_rendered_repo_is_linted_like_the_template(projects: dict[str, Path]) -> None:
    here = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    there = tomllib.loads((projects["defaults"] / "pyproject.toml").read_text())["tool"]["ruff"]
    assert there["line-length"] == here["line-length"]
    assert there["lint"]["select"] == here["lint"]["select"]


def test_the_hooks_before_a_commit_run_the_pinned_versions() -> None:
    used: dict[str, set[str]] = {}
    for file in (ROOT / ".pre-commit-config.yaml", TEMPLATE / ".pre-commit-config.yaml"):
        (repo,) = yaml.safe_load(file.read_text())["repos"]
        assert repo["repo"] == "local"  # nothing is cloned from anywhere
        for hook in repo["hooks"]:
            for requirement in map(Requirement, hook["additional_dependencies"]):
                used.setdefault(requirement.name, set()).add(str(requirement.specifier))
    assert used["ruff"] == {f"=={pins()['ruff'][0]}"}
    assert all(len(versions) == 1 and min(versions).startswith("==") for versions in used.values()), used


def test_the_readme_names_commands_and_settings_that_exist(variant: tuple[Path, dict[str, Any]]) -> None:
    text = (variant[0] / "README.md").read_text()
    commands = set(re.findall(r"python -m trainer ([a-z]+)", text))
    source = (TEMPLATE / "trainer/cli.py").read_text()
    assert commands >= {"checkpoints", "doctor", "drill", "export", "interval", "report"}
    for command in commands:
        assert re.search(rf"^(?:def {command}\(|@main.command\(\"{command}\")", source, re.MULTILINE), command
    modules = re.findall(r"python -m (tasks[.a-z_]+)", text)
    assert ("tasks.language_model.sample" in modules) == (variant[1]["task"] == "language_model")
    for path in [*(f"{module.replace('.', '/')}.py" for module in modules), *re.findall(r"`(t[a-z_/]+\.py)`", text)]:
        assert (variant[0] / path).is_file(), path
    for section, name in set(re.findall(rf"\b({'|'.join(SECTIONS)})\.([a-z_]+)\b(?!\()", text)):
        if name not in ("py", "yaml", "jsonl", "sh", "png", "safetensors", "exit_code"):  # files, and `Run.exit_code`
            assert name in {each.name for each in dataclasses.fields(SECTIONS[section])}, f"{section}.{name}"


@pytest.mark.parametrize("question", ["step_time", "save_time", "save_stall", "restart_time", "badput_target"])
def test_each_prompt_shows_the_interval_of_the_answers_so_far(question: str) -> None:
    environment = SandboxedEnvironment(
        loader=FileSystemLoader(ROOT),
        extensions=["jinja2_ansible_filters.AnsibleCoreFiltersExtension"],
        undefined=StrictUndefined,
    )
    earlier = list(QUESTIONS)[: list(QUESTIONS).index(question)]
    help_of = environment.from_string(QUESTIONS[question]["help"])
    known = {key: value for key, value in INTERVAL.items() if key in earlier}
    assert "So far: save every 367 steps (4m53.6s); floor 38, optimum 367, ceiling 1725 steps" in help_of.render(known)
    assert "So far no interval fits" in help_of.render(known | {"mtbi": "6m"})


def test_the_workflow_only_names_files_that_are_there(projects: dict[str, Path]) -> None:
    workflow = yaml.safe_load((projects["defaults"] / ".github/workflows/ci.yml").read_text())
    commands = " ".join(step.get("run", "") for step in workflow["jobs"]["test"]["steps"])
    for file in ("startup/requirements.txt", "restart.sh", "startup/onstart.sh"):
        assert file in commands
        assert (projects["defaults"] / file).is_file()
