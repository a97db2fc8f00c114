from hashlib import sha256
from pathlib import Path

import pytest

from nemo_gym.skills import SkillMetadata, hash_skill_dir, load_skill_directory, parse_skill_md, stage_skills


def write(root: Path, name: str, text: bytes = b"---\nname: cook\n---\nBoil.\n") -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_bytes(text)
    return folder


def test_a_folder_of_skills_is_loaded_and_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "skills", "b")
    described = b"\xef\xbb\xbf---\nname: bake\ndescription: Bread \xff\nmetadata:\n  version: 1.5\n---"
    write(tmp_path / "skills", "a", described)
    (tmp_path / "skills" / "README").write_text("x")

    found = load_skill_directory("skills")

    assert found.path == "skills"
    assert found.skills == [
        SkillMetadata(name="bake", description="Bread \N{REPLACEMENT CHARACTER}", version="1.5"),
        SkillMetadata(name="cook"),
    ]
    fed = b"README\0x\0a/SKILL.md\0" + described + b"\0b/SKILL.md\0---\nname: cook\n---\nBoil.\n\0"
    assert found.hash == hash_skill_dir(tmp_path / "skills") == sha256(fed).hexdigest()[:12]
    stage_skills("skills", tmp_path / "runtime" / "skills")
    assert (tmp_path / "runtime/skills/b/SKILL.md").read_bytes().startswith(b"---\nname: cook")
    with pytest.raises(FileExistsError):
        stage_skills("skills", tmp_path / "runtime" / "skills")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"no front matter", "must begin with front matter"),
        (b"---\nname: [\n---\n", "is no YAML"),
        (b"---\n- a\n---\n", "must have a `name`"),
        (b"---\ndescription: x\n---\n", "must have a `name`"),
    ],
)
def test_a_skill_without_a_name_is_refused(tmp_path: Path, text: bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_skill_md(write(tmp_path, "a", text) / "SKILL.md")


def test_a_folder_that_holds_no_skills_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        load_skill_directory(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="has no skills"):
        load_skill_directory(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"have no SKILL\.md: empty"):
        load_skill_directory(str(tmp_path))
