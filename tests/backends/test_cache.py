"""The folder of compiled files."""

from intflash.backends.cache import cache_folder


def no_home():
    raise RuntimeError("Could not determine home directory.")


def test_the_cache_folder_comes_from_the_environment_or_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder("a", "b") == tmp_path / "cache" / "intflash" / "a" / "b"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("a") == tmp_path / ".cache" / "intflash" / "a"


def test_a_user_without_a_home_gets_a_private_folder(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", no_home)
    folder = cache_folder("a")
    assert folder == cache_folder("a")
    assert folder.parent.parent.stat().st_mode & 0o077 == 0
    folder.mkdir(parents=True)
