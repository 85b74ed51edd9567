"""Compute the frequencies of a rotary embedding as transformers does (`modeling_rope_utils.py`), and its rotations."""

import math

import torch

from fusion.model.spec import Rotary


def inverse_frequencies(rotary: Rotary) -> torch.Tensor:
    """Return the angle per position of each pair of channels, float32 [width / 2]."""
    exponents = torch.arange(0, rotary.width, 2, dtype=torch.int64).to(torch.float32) / rotary.width
    powers = rotary.theta**exponents
    frequencies = 1.0 / powers
    match rotary.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rotary.factor
        case "yarn":
            kept = 1 - _ramp(rotary)
            return 1.0 / (rotary.factor * powers) * (1 - kept) + frequencies * kept
        case "llama3":
            return _llama3(frequencies, rotary)


def cosines_and_sines(
    positions_N: torch.Tensor, inv_freq: torch.Tensor, rotary: Rotary, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [N, 1, R] of the rotated channels; the sines of the first channel of each pair with the
    sign of the rotation. ``inv_freq``: `inverse_frequencies` of ``rotary``, on the device of the positions."""
    angles = positions_N.to(torch.float32)[:, None] * inv_freq
    cos, sin = angles.cos(), angles.sin()
    if rotary.attention_factor != 1.0:
        cos, sin = cos * rotary.attention_factor, sin * rotary.attention_factor
    if rotary.interleaved:
        cos_NC, sin_NC = cos.repeat_interleave(2, dim=-1), torch.stack([-sin, sin], dim=-1).flatten(-2)
    else:
        cos_NC, sin_NC = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    return cos_NC.to(dtype).unsqueeze(1), sin_NC.to(dtype).unsqueeze(1)


def _llama3(frequencies: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Return the frequencies as transformers blends them: its order of operations, so that both are bitwise equal."""
    positions, low, high = rotary.original_max_positions, rotary.low_freq_factor, rotary.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    is_long, is_short = wavelengths > positions / low, wavelengths < positions / high
    scaled = torch.where(is_long, frequencies / rotary.factor, frequencies)
    kept = (positions / wavelengths - low) / (high - low)
    blended = (1 - kept) * scaled / rotary.factor + kept * scaled
    return torch.where(is_long | is_short, scaled, blended)


def _ramp(rotary: Rotary) -> torch.Tensor:
    """Return the share of interpolation of each pair: 0 for high frequencies, 1 for low ones."""
    low, high = _pair(rotary, rotary.beta_fast), _pair(rotary, rotary.beta_slow)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.width - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(rotary.width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def _pair(rotary: Rotary, rotations: float) -> float:
    """Return the (fractional) pair that rotates so often within the original maximum of positions."""
    share = math.log(rotary.original_max_positions / (rotations * 2 * math.pi))
    return rotary.width * share / (2 * math.log(rotary.theta))
