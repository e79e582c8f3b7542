"""Certificates for tests, made by the openssl command."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from pagewire.wire.tls import Files


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)


@dataclass(frozen=True)
class Issued:
    """A certificate with its key."""

    certfile: Path
    keyfile: Path
    ca_certs: Path

    @property
    def files(self) -> Files:
        return Files(certfile=str(self.certfile), keyfile=str(self.keyfile), ca_certs=str(self.ca_certs))

    @property
    def flags(self) -> dict[str, str]:
        """The flags of a service or a client that shows this certificate."""
        return {
            "ssl_certfile": str(self.certfile),
            "ssl_keyfile": str(self.keyfile),
            "ssl_ca_certs": str(self.ca_certs),
        }


class Authority:
    """A CA with its files in a directory."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory = directory
        self._name = name
        self.ca_certs = directory / f"{name}.pem"
        self._key = directory / f"{name}.key"
        openssl(
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "30",
            "-subj",
            f"/CN={name}",
            "-keyout",
            self._key,
            "-out",
            self.ca_certs,
        )

    def issue(
        self, name: str, names: str = "DNS:localhost,IP:127.0.0.1", *, days: int = 30, purposes: str = ""
    ) -> Issued:
        """Issues a certificate. `names` is its subjectAltName, `purposes` its extendedKeyUsage ("" = all)."""
        certfile, keyfile = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        request, extensions = self._directory / f"{name}.csr", self._directory / f"{name}.ext"
        usage = f"\nextendedKeyUsage={purposes}" if purposes else ""
        extensions.write_text(f"subjectAltName={names}\nbasicConstraints=CA:FALSE{usage}\n")
        openssl(
            "req",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-subj",
            f"/CN={name}",
            "-keyout",
            keyfile,
            "-out",
            request,
        )
        openssl(
            "x509",
            "-req",
            "-in",
            request,
            "-CA",
            self.ca_certs,
            "-CAkey",
            self._key,
            "-CAcreateserial",
            "-days",
            str(days),
            "-extfile",
            extensions,
            "-out",
            certfile,
        )
        return Issued(certfile, keyfile, self.ca_certs)
