"""A container booted by systemd-nspawn out of this machine's own /usr, with an empty /etc.

The project and its interpreter are bound read-only at /opt/dapo and /opt/python; the state is in
the container's tree, where the test can read it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from common.process import die_with_parent, stop_group
from tests.deploy.waiting import ROOT

LIBRARIES = "/opt/python/lib"
"""Where the moved interpreter finds its own library, and not the system's of another version."""
UNITS = ROOT / "deploy" / "systemd"
MASKED = ("systemd-logind", "getty.target", "dbus.service", "dbus.socket", "systemd-networkd")
ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives")


class Container:
    """Booted and powered off by `with`."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.console = folder / "tree", folder / "console.txt"
        self.state = self.tree / "var/lib/dapo"
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._init = 0
        self._binds: dict[Path, str] = {Path("/usr"): "/usr"}
        self._make_tree()
        self._bind_project(folder / "venv")

    # --- the tree ---------------------------------------------------------------------------------

    def _make_tree(self) -> None:
        for name in ("etc/systemd/system", "usr", "var/lib", "var/cache", "run", "tmp", "root",
                     "proc", "sys", "dev", "opt/dapo", "opt/python"):  # fmt: skip
            (self.tree / name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (self.tree / name).symlink_to(f"usr/{name}")
        etc = self.tree / "etc"
        (etc / "machine-id").write_text("0123456789abcdef0123456789abcdef\n")
        shutil.copy("/etc/os-release", etc / "os-release")
        (etc / "passwd").write_text("root:x:0:0::/root:/bin/sh\n")
        (etc / "group").write_text("root:x:0:\n")
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        (etc / "hosts").write_text("127.0.0.1 localhost dapo-test\n")
        for name in ETC:
            source = Path("/etc") / name
            if source.is_dir():
                shutil.copytree(source, etc / name, symlinks=True)
            elif source.exists():
                shutil.copy(source, etc / name)
        for unit in MASKED:
            name = unit if "." in unit else f"{unit}.service"
            (etc / "systemd/system" / name).symlink_to("/dev/null")
        (etc / "systemd/system/default.target").symlink_to("/lib/systemd/system/basic.target")

    def _bind_project(self, venv: Path) -> None:
        """The environment's own interpreter is a link to where no unit may look: /root, often."""
        site = f"lib/python3.{sys.version_info.minor}/site-packages"
        (venv / "bin").mkdir(parents=True)
        (venv / "bin/python").symlink_to(f"/opt/python/bin/python3.{sys.version_info.minor}")
        (venv / "pyvenv.cfg").write_text("home = /opt/python/bin\n")
        (venv / site).mkdir(parents=True)
        self._binds |= {
            Path(sys.base_prefix): "/opt/python",
            ROOT: "/opt/dapo",
            venv: "/opt/dapo/.venv",
            Path(sys.prefix) / site: f"/opt/dapo/.venv/{site}",
        }

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """A file of the container, before it is booted."""
        target = self.tree / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch(mode=mode)
        target.write_text(text)

    def install_units(self) -> None:
        """As deploy/README.md says; users are made at once, folders at boot."""
        for unit in (*UNITS.glob("*.service"), UNITS / "dapo.target"):
            shutil.copy(unit, self.tree / "etc/systemd/system")
        self.write("/etc/sysusers.d/dapo.conf", (UNITS / "sysusers.conf").read_text())
        self.write("/etc/tmpfiles.d/dapo.conf", (UNITS / "tmpfiles.conf").read_text())
        subprocess.run(["systemd-sysusers", f"--root={self.tree}", "dapo.conf"], check=True)

    # --- its life ---------------------------------------------------------------------------------

    def __enter__(self) -> Container:
        binds = [f"--bind-ro={source}:{target}" for source, target in self._binds.items()]
        # the editable install points at where the project is
        binds.append(f"--bind-ro={ROOT}:{ROOT}")
        with self.console.open("wb") as out:
            self._nspawn = subprocess.Popen(
                ["systemd-nspawn", f"--directory={self.tree}", "--boot", "--register=no",
                 "--keep-unit", "--private-network", "--hostname=dapo-test", "--console=pipe",
                 "--resolv-conf=off", "--timezone=off", "--link-journal=no", *binds],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                preexec_fn=die_with_parent,
            )  # fmt: skip
        try:
            self._await_boot()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        assert self._nspawn is not None
        if self._nspawn.poll() is not None:
            return  # it never came up, and took everything along
        family = psutil.Process(self._nspawn.pid).children(recursive=True)
        stop_group(self._nspawn, 60.0)
        psutil.wait_procs(family, timeout=10)

    def _await_boot(self) -> None:
        assert self._nspawn is not None
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self._nspawn.poll() is None:
            for child in psutil.Process(self._nspawn.pid).children():
                self._init = child.pid
                told = self.attempt("systemctl", "is-system-running")
                if told.stdout.strip() in ("running", "degraded"):
                    return
            time.sleep(0.3)
        raise NotBooted(self.console.read_text(errors="replace")[-1500:])

    def attempt(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as root."""
        enter = ["nsenter", f"--target={self._init}", "--mount", "--uts", "--ipc", "--net", "--pid"]
        environment = {"PATH": "/usr/sbin:/usr/bin", "HOME": "/root"}
        return subprocess.run(
            [*enter, "--", *command], env=environment, capture_output=True, text=True, timeout=300
        )

    def run(self, *command: str) -> str:
        """What it prints; it must succeed."""
        done = self.attempt(*command)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit).strip()

    def journal(self, unit: str) -> str:
        return self.attempt("journalctl", "--no-pager", "--lines=40", f"--unit={unit}").stdout


class NotBooted(Exception):
    """The container did not come up; what it said."""


def may_boot() -> str:
    """Why no container can be booted here; empty if one can."""
    if os.geteuid() != 0:
        return "booting a container needs root"
    if not Path("/usr/lib/systemd/systemd").exists():
        return "no /usr/lib/systemd/systemd here; apt-get install systemd"
    if sys.base_prefix == "/usr":
        return "the environment's Python is the system's: /usr cannot be bound at /opt/python too"
    return ""
