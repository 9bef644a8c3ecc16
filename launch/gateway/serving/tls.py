"""HTTPS: the certificate that the gateway shows, and the authority that its clients' certificates must come from."""

from __future__ import annotations

import logging
import ssl
from typing import NoReturn

from ....protocol.errors import ConfigError
from ..config import GatewayConfig
from .file_version import version_of

logger = logging.getLogger(__name__)


class Certificate:
    """The certificate of a config, and the TLS context that shows it. New connections get the one that its files hold
    now: what renews certificates replaces the files, and nothing needs a restart.
    """

    def __init__(self, config: GatewayConfig) -> None:
        """
        Raises:
            ConfigError: see ``make_context``.
        """
        self._config = config
        self._version = self._version_of_files()  # before they are read: what changes meanwhile is then read again
        self.context = make_context(config)

    def renew(self) -> None:
        """Show the certificate that the files hold, if they have changed. An unusable one changes nothing.

        When only one of the two files has been replaced yet, they do not fit.
        """
        if (version := self._version_of_files()) == self._version:
            return
        self._version = version
        try:
            make_context(self._config)  # of a pair that does not fit, the context in use would keep one half
            _load(self.context, self._config)
            logger.info("the certificate in %s has changed", self._config.ssl_certfile)
        except ConfigError as error:
            logger.warning("%s; the certificate read before is still used", error)

    def _version_of_files(self) -> tuple[tuple[int, ...], ...]:
        return version_of(self._config.ssl_certfile), version_of(self._config.ssl_keyfile)


def check_certificate(config: GatewayConfig) -> None:
    """
    Raises:
        ConfigError: see ``make_context``.
    """
    if config.is_tls:
        make_context(config)


def make_context(config: GatewayConfig) -> ssl.SSLContext:
    """A context that shows the config's certificate, for TLS 1.2 and later.

    Raises:
        ConfigError: a file cannot be read, or contains nothing of its kind; the key is encrypted, or another
            certificate's.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    _load(context, config)
    if config.ssl_ca_certs is not None:
        _trust(context, "ssl_ca_certs", config.ssl_ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load(context: ssl.SSLContext, config: GatewayConfig) -> None:
    certfile, keyfile = config.ssl_certfile, config.ssl_keyfile
    assert certfile is not None, "the caller has looked"
    _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "ssl_certfile", certfile)  # says whether it is a certificate
    name, path = ("ssl_certfile", certfile) if keyfile is None else ("ssl_keyfile", keyfile)
    try:
        # Without a function for the password, OpenSSL would ask for it on the terminal.
        context.load_cert_chain(certfile, keyfile, password=_refuse_password)
    except ssl.SSLError as error:
        is_other = error.reason == "KEY_VALUES_MISMATCH"
        why = (
            f"is not the key of the certificate in {certfile}" if is_other else "contains no private key in PEM format"
        )
        raise ConfigError(f"{name} {path} {why}", param=name) from error
    except ValueError as error:
        raise ConfigError(f"{name} {path} {error}", param=name) from error
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}", param=name) from error


def _trust(context: ssl.SSLContext, name: str, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{name} {path} contains no certificate in PEM format", param=name) from error
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}", param=name) from error


def _refuse_password() -> NoReturn:
    raise ValueError("is encrypted: the gateway takes keys without a password only")
