import json
import os
import subprocess
import sys
from collections.abc import Callable

import psutil

from nemo_gym import PARENT_DIR, __version__
from nemo_gym.cli.commands.about import as_text, version_facts

Script = Callable[..., subprocess.CompletedProcess[str]]


def test_json_has_the_documented_keys(script: Script) -> None:
    done = script("ng_version", "+json=true")
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert list(facts) == ["nemo_gym", "python", "python_path", "installation_path", "dependencies", "system"]
    assert list(facts["dependencies"]) == ["openai", "ray"]
    assert list(facts["system"]) == ["os", "platform", "architecture", "processor", "cpus", "memory_gb"]
    assert facts["nemo_gym"] == __version__
    assert facts["installation_path"] == str(PARENT_DIR)


def test_text_is_for_people(script: Script) -> None:
    done = script("nemo_gym_version")
    assert done.returncode == 0
    assert done.stdout.startswith(f"NeMo Gym {__version__}\n")


def test_the_machine_is_described_truthfully() -> None:
    system = version_facts()["system"]
    assert system["cpus"] == os.cpu_count()
    assert abs(system["memory_gb"] - psutil.virtual_memory().total / 2**30) < 0.1


def test_a_package_that_is_not_installed_has_no_version_and_is_not_imported() -> None:
    facts = version_facts() | {"dependencies": {"openai": "1.2", "ray": None}}
    text = as_text(facts)
    assert "openai: 1.2" in text
    assert "ray: not installed" in text
    probe = (
        "import sys\nfrom nemo_gym.cli.commands.about import version_facts\nversion_facts()\n"
        "assert not {'openai', 'ray', 'psutil'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)
