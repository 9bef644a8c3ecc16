"""HTTPS without a proxy: what is shown to clients, what is asked of them, and certificates that are renewed."""

from __future__ import annotations

import shutil
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tests.launch.gateway.conftest import Site, site
from tests.launch.gateway.serving.test_processes import served
from tests.waiting import eventually
from triptych import Driver
from triptych.launch.gateway.config import GatewayConfig
from triptych.launch.gateway.serving.tls import make_context
from triptych.protocol.errors import ConfigError


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(tmp_path: Path, authority: trustme.CA) -> dict[str, str]:
    """Options of a gateway: its certificate and key, in two files."""
    return _issued(authority, tmp_path)


def _issued(authority: trustme.CA, folder: Path) -> dict[str, str]:
    issued, certfile, keyfile = authority.issue_cert("127.0.0.1"), folder / "certificate.pem", folder / "key.pem"
    certfile.write_bytes(issued.cert_chain_pems[0].bytes())
    keyfile.write_bytes(issued.private_key_pem.bytes())
    return {"ssl_certfile": str(certfile), "ssl_keyfile": str(keyfile)}


def _trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def _shown(api: Site, authority: trustme.CA) -> bytes | None:
    """The certificate that a new connection sees."""
    where = urlsplit(api.url)
    with (
        socket.create_connection((where.hostname, where.port), timeout=10) as plain,
        _trusting(authority).wrap_socket(plain, server_hostname=where.hostname) as connection,
    ):
        return connection.getpeercert(binary_form=True)


def _as_der(path: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(path).read_text())


def test_gateway_serves_https(pipeline: Driver, files: dict[str, str], authority: trustme.CA) -> None:
    with served(pipeline, **files) as unaware:
        url = str(unaware.base_url)
        assert url.startswith("https://127.0.0.1:")
        with httpx2.Client(base_url=url, timeout=30, trust_env=False, verify=_trusting(authority)) as http:
            body = {"prompt": "hi", "max_tokens": 3, "stream": True}
            assert http.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
            with pytest.raises(httpx2.ConnectError, match="certificate"):
                unaware.get("/health")
            with pytest.raises(httpx2.TransportError):
                httpx2.get(url.replace("https", "http") + "/health", trust_env=False)
            assert http.get("/health").status_code == 200


def test_renewed_certificate_is_shown_without_a_restart(
    pipeline: Driver, files: dict[str, str], authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "renewed").mkdir()
    renewed = _issued(authority, tmp_path / "renewed")
    with site(pipeline.run_dir, **files) as api:
        before = _as_der(files["ssl_certfile"])
        assert _shown(api, authority) == before
        shutil.move(renewed["ssl_certfile"], files["ssl_certfile"])
        eventually(lambda: "is not the key of" in caplog.text)  # that of the old certificate, for the moment
        assert _shown(api, authority) == before
        shutil.move(renewed["ssl_keyfile"], files["ssl_keyfile"])
        eventually(lambda: _shown(api, authority) == _as_der(files["ssl_certfile"]))


def test_clients_need_a_certificate_if_an_authority_for_them_is_named(
    pipeline: Driver, files: dict[str, str], authority: trustme.CA, tmp_path: Path
) -> None:
    clients, own = trustme.CA(), _trusting(authority)
    clients.cert_pem.write_to_path(str(tmp_path / "clients.pem"))
    clients.issue_cert("alice@example.org").configure_cert(own)
    foreign = _trusting(authority)
    authority.issue_cert("mallory@example.org").configure_cert(foreign)
    with site(pipeline.run_dir, **files, ssl_ca_certs=str(tmp_path / "clients.pem")) as api:
        for context, is_allowed in ((own, True), (foreign, False), (_trusting(authority), False)):
            with httpx2.Client(base_url=api.url, timeout=30, trust_env=False, verify=context) as http:
                if is_allowed:
                    assert http.get("/health").status_code == 200
                else:
                    with pytest.raises(httpx2.TransportError):
                        http.get("/health")


def _encrypt(files: dict[str, str]) -> None:
    key = load_pem_private_key(Path(files["ssl_keyfile"]).read_bytes(), None)
    form = (Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password"))
    Path(files["ssl_keyfile"]).write_bytes(key.private_bytes(*form))


def _exchange(files: dict[str, str]) -> None:
    Path(files["ssl_keyfile"]).write_bytes(trustme.CA().issue_cert("127.0.0.1").private_key_pem.bytes())


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda files: Path(files["ssl_certfile"]).unlink(), "ssl_certfile .*certificate.pem cannot be read: No such"),
        (lambda files: Path(files["ssl_certfile"]).write_text("no"), "ssl_certfile .* contains no certificate in PEM"),
        (lambda files: files.pop("ssl_keyfile"), "ssl_certfile .* contains no private key in PEM format"),
        (lambda files: Path(files["ssl_keyfile"]).unlink(), "ssl_keyfile .*key.pem cannot be read: No such file"),
        (
            lambda files: Path(files["ssl_keyfile"]).write_bytes(b"\xff"),
            "ssl_keyfile .* contains no private key in PEM",
        ),
        (_exchange, "ssl_keyfile .*key.pem is not the key of the certificate in .*certificate.pem"),
        (_encrypt, "ssl_keyfile .*key.pem is encrypted"),
        (lambda files: files.update(ssl_ca_certs="nowhere.pem"), "ssl_ca_certs nowhere.pem cannot be read"),
        (lambda files: files.update(ssl_ca_certs=files["ssl_keyfile"]), "ssl_ca_certs .* contains no certificate"),
        (lambda files: files.pop("ssl_certfile"), "ssl_keyfile needs ssl_certfile"),
    ],
)
def test_unusable_certificate_is_refused(
    files: dict[str, str], spoil: Callable[[dict[str, str]], object], why: str
) -> None:
    make_context(GatewayConfig(**files))  # type: ignore[arg-type]
    spoil(files)
    with pytest.raises(ConfigError, match=why):
        make_context(GatewayConfig(**files))  # type: ignore[arg-type]
