"""Generate the noise of sampling: one number per (run seed, request, position), independent of the batch.

Counter-based generator Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a
bijection of a 128-bit counter under a 64-bit key. Key: the run's seed. Counter: position, stream, hash of the request
id. So a token's noise does not depend on batch, engine, schedule or on how often it is drawn."""

import hashlib

import numpy as np

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
ROUNDS = 10


def philox4x32(counter_4N: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds over N counters of four 32-bit words (held in uint64 [4, N]); returns the same shape."""
    k0, k1 = key
    keys = np.array(
        [[[k0 + r * _WEYL[0] & 0xFFFFFFFF], [k1 + r * _WEYL[1] & 0xFFFFFFFF]] for r in range(ROUNDS)], np.uint64
    )
    even, odd = counter_4N[0::2], counter_4N[1::2]  # words 0 and 2 are multiplied, 1 and 3 mixed in
    for round_key in keys:
        product = even * _MULTIPLIERS
        even, odd = (product >> _32)[::-1] ^ odd ^ round_key, (product & _LOW)[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]])


def request_key(request_id: str) -> int:
    """A 64-bit hash of a request's name that is the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")


def uniforms(seed: int, request_keys: np.ndarray, positions: np.ndarray, stream: int = 0) -> np.ndarray:
    """float64 [N] in [0, 1), 53 random bits each.
    ``seed``: the run's, any integer; its low 64 bits count.
    ``request_keys``: uint64 [N], see `request_key`.
    ``positions``: int [N], index of the token in prompt and response together.
    ``stream``: separates draws of different purpose at one position; 0 is the sampler's."""
    keys = request_keys.astype(np.uint64)
    counter = np.stack([positions.astype(np.uint64), np.full(keys.shape, stream, np.uint64), keys & _LOW, keys >> _32])
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    return ((words[0] >> np.uint64(5)) * 2.0**26 + (words[1] >> np.uint64(6))) * 2.0**-53
