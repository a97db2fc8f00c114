"""A stand-in for the `docker` command: its containers are real processes, which see this machine's files.

It keeps what it knows in the folder `STAND_IN_STATE`. To end the client of `exec` does not end the command, as with the
original. While there is a file `stuck`, the first container cannot be removed. Images: `missing` cannot be fetched,
`slow` takes for ever, `broken` ends at once; all others work.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

STATE = Path(os.environ["STAND_IN_STATE"])
CONTAINERS = STATE / "containers"
WITH_VALUE = {
    "--name", "--label", "-w", "--env", "--cpus", "--memory", "--memory-swap", "--gpus", "--network", "--cap-drop",
    "--security-opt", "--pids-limit", "--publish", "-v", "--entrypoint", "--user", "--filter", "--format",
}  # fmt: skip
MARK = "STAND_IN_CONTAINER"
NOT_STARTED = "OCI runtime exec failed: exec failed: unable to start container process"


def fail(message: str, code: int) -> NoReturn:
    sys.stderr.write(message + "\n")
    sys.exit(code)


def read_options(arguments: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Options with their values, and what comes after them."""
    options: dict[str, list[str]] = {}
    while arguments and arguments[0].startswith("-"):
        name = arguments.pop(0)
        options.setdefault(name, []).append(arguments.pop(0) if name in WITH_VALUE else "")
    return options, arguments


def variables(options: dict[str, list[str]]) -> dict[str, str]:
    pairs = [text.partition("=") for text in options.get("--env", [])]
    return {name: value if found else os.environ.get(name, "") for name, found, value in pairs}


def file_of(name: str) -> Path:
    return CONTAINERS / f"{name}.json"


def load(name: str) -> dict[str, Any]:
    try:
        return dict(json.loads(file_of(name).read_text()))
    except FileNotFoundError:
        fail(f"Error response from daemon: No such container: {name}", 1)


def is_running(container: dict[str, Any]) -> bool:
    try:
        return "Z" not in Path(f"/proc/{container['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_all(name: str) -> None:
    mark = f"{MARK}={name}".encode()
    for _ in range(50):
        victims = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    victims.append(int(folder.name))
            except OSError:
                continue
        if not victims:
            return
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(0.02)


def there_are() -> list[tuple[str, dict[str, Any]]]:
    """Every container; others may be removing some of them."""
    found = []
    for file in CONTAINERS.glob("*.json"):
        try:
            found.append((file.stem, json.loads(file.read_text())))
        except FileNotFoundError:
            continue
    return found


def sweep() -> None:
    """What the daemon does by itself: a container ends with its first process."""
    for name, container in there_are():
        if not is_running(container):
            kill_all(name)
            if container["rm"]:
                file_of(name).unlink(missing_ok=True)


def start_quietly(command: list[str], env: dict[str, str], folder: str) -> "subprocess.Popen[bytes]":
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(
        command, cwd=folder, env=env, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True
    )


def run(arguments: list[str]) -> None:
    options, (image, *command) = read_options(arguments)
    if image.startswith("missing"):
        more = "\n\nRun 'docker run --help' for more information"
        fail(f"docker: Error response from daemon: pull access denied for {image}.{more}", 125)
    if image.startswith("slow"):
        (STATE / "pulling").write_text(str(os.getpid()))
        time.sleep(3600)
    (name,) = options["--name"]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", **variables(options), MARK: name}
    workdir = options.get("-w", [str(STATE)])[0]
    Path(workdir).mkdir(parents=True, exist_ok=True)
    first = ["false"] if image.startswith("broken") else [options["--entrypoint"][0], *command]
    process = start_quietly(first, env, workdir)
    labels = dict(label.split("=", 1) for label in options.get("--label", []))
    kept = {"pid": process.pid, "env": env, "workdir": workdir, "labels": labels, "image": image}
    kept |= {"ports": options.get("--publish", []), "rm": "--rm" in options}
    unfinished = file_of(name).with_suffix(".new")
    unfinished.write_text(json.dumps(kept))
    unfinished.rename(file_of(name))
    if image.startswith("broken"):
        process.wait()
    print(name)


def execute(arguments: list[str]) -> None:
    options, (name, *command) = read_options(arguments)
    container = load(name)
    if not is_running(container):
        fail(f"Error response from daemon: container {name} is not running", 1)
    workdir = options.get("-w", [container["workdir"]])[0]
    if not Path(workdir).is_dir():
        fail(f"{NOT_STARTED}: chdir to cwd ({workdir}) set in config.json failed: no such file or directory", 126)
    env = {**container["env"], **variables(options)}
    if "--user" in options:
        env["STAND_IN_USER"] = options["--user"][0]
    stdin = None if "-i" in options else subprocess.DEVNULL
    code = subprocess.Popen(command, cwd=workdir, env=env, stdin=stdin, start_new_session=True).wait()
    sys.exit(128 - code if code < 0 else code)


def copy(arguments: list[str]) -> None:
    options, (source, target) = read_options(arguments)
    places = []
    for text in (source, target):
        name, colon, path = ("", "", text) if text.startswith("/") else text.partition(":")
        if colon:
            load(name)
        places.append(Path(path if colon else text))
    for needed in (places[0], places[1].parent):
        if not needed.exists():
            fail(f"Error response from daemon: Could not find the file {needed} in container", 1)
    if places[0].is_fifo():  # as in a tar archive, which the original makes of it
        os.mkfifo(places[1])
    elif places[0].is_dir():
        shutil.copytree(places[0], places[1])
    else:
        shutil.copyfile(*places, follow_symlinks="-L" in options)


def remove(arguments: list[str]) -> None:
    for name in [each for each in arguments if not each.startswith("-")]:
        load(name)
        if (STATE / "stuck").exists() and name == min(stem for stem, _ in there_are()):
            fail(f"Error response from daemon: removal of container {name} is already in progress", 1)
        kill_all(name)
        file_of(name).unlink(missing_ok=True)
        print(name)


def show(arguments: list[str]) -> None:
    options, _ = read_options(arguments)
    wanted = dict(text.removeprefix("label=").split("=", 1) for text in options.get("--filter", []))
    for name, container in there_are():
        if wanted.items() <= container["labels"].items():
            print(name)


def inspect(arguments: list[str]) -> None:
    _, (name,) = read_options(arguments)
    print("running" if is_running(load(name)) else "exited")


def logs(arguments: list[str]) -> None:
    name = arguments[-1]
    if load(name)["image"].startswith("broken"):
        sys.stderr.write("sh: exec /nothing: not found\n")


def port(arguments: list[str]) -> None:
    name, wanted = arguments
    for published in load(name)["ports"]:
        host, _, inside = published.partition("::")
        if inside == wanted:
            print(f"{host}:{inside.removesuffix('/tcp')}")
            return
    fail(f"no public port '{wanted}' published for {name}", 1)


if __name__ == "__main__":
    CONTAINERS.mkdir(parents=True, exist_ok=True)
    with (STATE / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    if (STATE / "down").exists():
        fail("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?", 1)
    verb, *rest = sys.argv[1:]
    sweep()
    verbs = {"run": run, "exec": execute, "cp": copy, "rm": remove, "ps": show, "inspect": inspect, "port": port}
    verbs["logs"] = logs
    verbs[verb](rest)
