"""Signature Version 4 of requests that differ in nothing but their time and their body.

All that stays the same is put into its canonical form once, and the key of a day is made once a day: what is left of a
signature is two digests. Which headers are signed, for which region and service, and by whose credentials, is said by
whoever asks; nothing here reads a clock or an environment.
"""

import hashlib
import hmac
from collections.abc import Mapping

ALGORITHM = "AWS4-HMAC-SHA256"
DATE = "x-amz-date"


def _keyed(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")


class Signer:
    """Signs requests for `/` of one service by one pair of keys.

    headers  all that is signed but the time: names in lower case
    """

    def __init__(
        self,
        access_key: str,
        secret_key: str,
        *,
        region: str,
        service: str,
        headers: Mapping[str, str],
        method: str = "POST",
    ) -> None:
        self._access_key, self._secret_key = access_key, secret_key
        self._scope = f"{region}/{service}/aws4_request"
        names = sorted({*headers, DATE})
        self.signed = ";".join(names)
        """The names of what is signed."""
        # Spaces around a value do not count, and several in it count as one.
        lines = [f"{name}:{' '.join(headers[name].split())}\n" if name != DATE else "" for name in names]
        at = names.index(DATE)
        self._before = f"{method}\n/\n\n{''.join(lines[:at])}{DATE}:"
        self._after = f"\n{''.join(lines[at:])}\n{self.signed}\n"
        self._kept = "", b""  # a day and its key, in one value: other threads may be at it

    def authorization(self, time: str, body: bytes) -> str:
        """The header that signs this body at this time, which is written as in 20150830T123600Z."""
        day, (kept_for, key) = time[:8], self._kept
        if day != kept_for:
            key = f"AWS4{self._secret_key}".encode()
            for part in (day, *self._scope.split("/")):
                key = _keyed(key, part)
            self._kept = day, key
        canonical = f"{self._before}{time}{self._after}{hashlib.sha256(body).hexdigest()}"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        scope = f"{day}/{self._scope}"
        signature = _keyed(key, f"{ALGORITHM}\n{time}\n{scope}\n{digest}").hex()
        return f"{ALGORITHM} Credential={self._access_key}/{scope}, SignedHeaders={self.signed}, Signature={signature}"
