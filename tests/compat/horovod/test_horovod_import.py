"""``import horovod`` in ranks: Paceline's implementation, or Horovod where it is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

from paceline.cluster.horovod_import import SHIM, check_choice, find_installed, with_horovod

REAL = "__version__ = '0.28.1'\nIS_REAL = True\n"
ANNOUNCED = "import horovod uses Paceline's implementation, paceline.compat.horovod"


@pytest.fixture
def installed(tmp_path):
    """Return a folder in which something named horovod is installed."""
    folder = tmp_path / "site/horovod"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(REAL)
    (folder / "timeline.py").write_text("IS_REAL = True\n")
    return str(folder.parent)


def test_script_finds_paceline_by_every_name(tmp_path):
    """One job: modules are the same objects, processes of multiprocessing find them as well."""
    script = ranks.write(
        tmp_path,
        """
        import sys
        import horovod
        import horovod.torch as hvd
        from horovod.torch import mpi_ops
        from horovod.torch.mpi_ops import allreduce, Sum
        from horovod.torch.compression import Compression
        from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
        from horovod.common.process_sets import ProcessSet, global_process_set
        import horovod.common.util
        import paceline.compat.horovod.torch as ours

        assert hvd is ours is sys.modules["horovod.torch"] is horovod.torch
        assert hvd.__spec__.name == "paceline.compat.horovod.torch"
        assert mpi_ops.allreduce is hvd.allreduce is allreduce
        assert horovod.common.exceptions.HorovodInternalError is HorovodInternalError
        assert tuple(map(int, horovod.__version__.split("."))) >= (0, 28, 1)
        assert horovod.common.util.gloo_built() and not horovod.common.util.mpi_built()
        assert horovod.common.util.extension_available("torch")
        for missing in ("tensorflow", "keras", "mxnet", "spark", "ray", "nothing.at.all"):
            try:
                __import__(f"horovod.{missing}")
            except ModuleNotFoundError as error:
                text = str(error)
                assert text.startswith(f"horovod.{missing.partition('.')[0]} "), text
                assert "HINT: " in text and chr(10) not in text
            else:
                assert False
        print("whole")
        """,
    )
    (tmp_path / "horovod").mkdir()  # a folder of scripts, not a module
    done = ranks.run(script)
    assert done.returncode == 0, done.stderr
    assert "whole" in done.stdout
    assert done.stderr.count(ANNOUNCED) == 1


@pytest.mark.parametrize("local", [False, True])
def test_ddl_is_found_unless_the_script_has_one(tmp_path, local):
    """IBM's ddl has a world as soon as it is imported. Keras comes with the first callback."""
    script = ranks.write(
        tmp_path,
        """
        import ddl
        if hasattr(ddl, "size"):
            print(ddl.size(), sorted([ddl.rank(), 1 - ddl.rank()]), ddl.local_size())
            try:
                ddl.Bcast
            except AttributeError as error:
                assert "HINT: horovod.tensorflow" in str(error)
        else:
            print(ddl.OWN)
        """,
    )
    if local:
        (tmp_path / "ddl.py").write_text("OWN = 'own'\n")
    done = ranks.run(script)
    assert ranks.untagged(done.stdout) == ({"own"} if local else {"2 [0, 1] 2"})
    assert ("import ddl uses Paceline's implementation" in done.stderr) is not local


def test_processes_of_multiprocessing_find_it(tmp_path):
    """They import the script again: the loaders of Horovod's examples are of this kind."""
    script = ranks.write(
        tmp_path,
        """
        import multiprocessing
        import horovod

        def child(queue):
            from horovod import timeline
            queue.put(timeline.__name__)

        if __name__ == "__main__":
            for method in ("spawn", "forkserver"):
                context = multiprocessing.get_context(method)
                queue = context.Queue()
                process = context.Process(target=child, args=(queue,))
                process.start()
                print(queue.get(timeout=60))
                process.join()
        """,
    )
    done = ranks.run(script, ranks=1)
    assert done.stdout.split() == ["paceline.compat.horovod.timeline"] * 2
    assert done.stderr.count(ANNOUNCED) == 1


def test_option_chooses(tmp_path, installed):
    """A package beside the script is found like one that is installed."""
    text = "import horovod\nprint(getattr(horovod, 'IS_REAL', 'ours'))\n"
    alone, beside = ranks.write(tmp_path, text), ranks.write(Path(installed), text)

    def found(script, option=""):
        launcher = f"paceline --horovod {option}" if option else "paceline"
        return ranks.run(script, ranks=1, launcher=launcher, check=False)

    assert found(alone).stdout.strip() == "ours"
    real = found(beside)
    assert (real.stdout.strip(), ANNOUNCED in real.stderr) == ("True", False)
    assert found(beside, "theirs").stdout.strip() == "True"
    assert found(beside, "ours").stdout.strip() == "ours"
    assert "No module named 'horovod'" in found(alone, "off").stderr
    refused = found(alone, "theirs")
    assert refused.returncode == 2
    assert "HINT: --horovod ours" in refused.stderr


def test_other_scripts_find_no_horovod(tmp_path):
    """Libraries choose Horovod where it can be imported."""
    script = "import importlib.util as u\nprint(u.find_spec('horo' + 'vod'))\n"
    assert ranks.run(ranks.write(tmp_path, script), ranks=1).stdout.strip() == "None"


def test_recorded_rank_of_another_launcher_finds_it(tmp_path):
    script = ranks.write(tmp_path, "import horovod\nprint(horovod.__name__)\n")
    words = [ranks.PACELINE, "record", tmp_path / "record", script]
    done = ranks.run_command(words, tmp_path, ranks.environment())
    assert done.stdout.strip() == "paceline.compat.horovod", done.stderr
    assert ANNOUNCED in done.stderr


@pytest.mark.parametrize("real", [False, True])
def test_folder_for_pythonpath_never_hides_horovod(tmp_path, installed, real):
    path = os.pathsep.join([str(SHIM), installed] if real else [str(SHIM)])
    code = "import horovod, horovod.timeline as t; print(getattr(t, 'IS_REAL', 'ours'), t.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=ranks.environment(PYTHONPATH=path),
        capture_output=True,
        text=True,
    )
    expected = "True horovod.timeline" if real else "ours paceline.compat.horovod.timeline"
    assert done.stdout.strip() == expected, done.stderr
    assert (ANNOUNCED in done.stderr) is not real


def test_folder_of_other_users_replaces_nothing(tmp_path):
    """A script in a folder like /tmp, with a package that another user has put there."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    tmp_path.chmod(0o1777)
    folders = ["/installed", str(tmp_path)]
    found = with_horovod(folders, used=True, environment={})
    assert found == ["/installed", str(SHIM), str(tmp_path)]
    assert find_installed(folders) is None
    tmp_path.chmod(0o755)
    assert find_installed(folders) is not None


def test_search_path_of_a_rank(installed):
    folders = ["/script", installed]
    assert with_horovod(folders, used=True, environment={}) == [*folders, str(SHIM)]
    assert with_horovod([*folders, str(SHIM)], used=False, environment={}) == folders
    for choice, expected in (("ours", [str(SHIM), *folders]), ("off", folders)):
        made = with_horovod(folders, used=True, environment={"PACELINE_HOROVOD": choice})
        assert made == expected
    assert find_installed([str(SHIM)]) is None
    assert find_installed([str(SHIM), installed]).origin.startswith(installed)
    with pytest.raises(ValueError, match=r"'mine'.*HINT: leave it out"):
        check_choice("mine")
