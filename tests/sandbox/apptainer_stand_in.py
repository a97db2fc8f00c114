"""A stand-in for the `apptainer` command: its instances are real processes, which see this machine's files.

What is bound to `/sandbox` is found there by putting its real path into commands. Images called `missing` cannot be
had.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from docker_stand_in import MARK, STATE, is_running, kill_all, start_quietly  # type: ignore[import-not-found]

INSTANCES = STATE / "instances"
WITH_VALUE = {"--bind", "--cpus", "--memory", "--env-file", "--pwd"}


def fail(message: str) -> NoReturn:
    sys.stderr.write(f"FATAL:   {message}\n")
    sys.exit(255)


def read_options(arguments: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    options: dict[str, list[str]] = {}
    while arguments and arguments[0].startswith("-"):
        name = arguments.pop(0)
        options.setdefault(name, []).append(arguments.pop(0) if name in WITH_VALUE else "")
    return options, arguments


def variables(options: dict[str, list[str]]) -> dict[str, str]:
    found = {}
    for file in options.get("--env-file", []):
        assert oct(Path(file).stat().st_mode & 0o777) == "0o600"
        for word in shlex.split(Path(file).read_text()):
            name, _, value = word.partition("=")
            found[name] = value
    return found


def start(arguments: list[str]) -> None:
    options, (image, name) = read_options(arguments)
    if "missing" in image:
        fail(f"Unable to handle {image} uri: image not found")
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", **variables(options), MARK: name}
    process = start_quietly(["sleep", "3600"], env, str(STATE))
    kept = {"pid": process.pid, "env": env, "binds": options["--bind"], "image": image, "options": options}
    (INSTANCES / f"{name}.json").write_text(json.dumps(kept))


def execute(arguments: list[str]) -> None:
    options, (name, *command) = read_options(arguments)
    file = INSTANCES / f"{name.removeprefix('instance://')}.json"
    if not file.exists() or not is_running(instance := json.loads(file.read_text())):
        fail(f"no instance found with name {name}")
    for bind in instance["binds"]:
        outside, inside = bind.split(":")
        command = [part.replace(f"{inside}/", f"{outside}/") for part in command]
    cwd = options.get("--pwd", [str(STATE)])[0]
    if not Path(cwd).is_dir():
        fail(f"chdir {cwd}: no such file or directory")
    env = {**instance["env"], **variables(options), "STAND_IN_ROOT": "1" if "--fakeroot" in options else "0"}
    code = subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True).wait()
    sys.exit(128 - code if code < 0 else code)


def stop(name: str) -> None:
    file = INSTANCES / f"{name}.json"
    if not file.exists():
        fail(f"no instance found with name {name}")
    kill_all(name)
    file.unlink()


def show() -> None:
    found = [(file.stem, json.loads(file.read_text())) for file in INSTANCES.glob("*.json")]
    listed = [{"instance": name, "pid": each["pid"], "img": each["image"]} for name, each in found if is_running(each)]
    print(json.dumps({"instances": listed}))


if __name__ == "__main__":
    INSTANCES.mkdir(parents=True, exist_ok=True)
    with (STATE / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    verbs = sys.argv[1:3]
    if verbs == ["instance", "start"]:
        start(sys.argv[3:])
    elif verbs == ["instance", "stop"]:
        stop(sys.argv[3])
    elif verbs == ["instance", "list"]:
        show()
    else:
        execute(sys.argv[2:])
