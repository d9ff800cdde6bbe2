"""Values as the CF conventions store them, which xarray writes: scaled numbers, missing values."""

import base64
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from ....security.text import printable

Array = np.ndarray[Any, Any]
MISSING = ("_FillValue", "missing_value")
SHOWN_CHARS = 60


class CFDecoder:
    """Decode the values of one array by its attributes, as netCDF4 and xarray do.

    Attributes:
        dtype: Name of the dtype of decoded values.
    """

    def __init__(self, attributes: Mapping[str, Any], dtype: Any, description: str) -> None:
        stored = np.dtype(dtype).newbyteorder("=")
        self._description, self._missing, self._unsigned = description, list[Any](), False
        self._scale = self._offset = None
        if stored.kind in "iuf":
            self._scale = self._factor(attributes, "scale_factor")
            self._offset = self._factor(attributes, "add_offset")
            self._unsigned = stored.kind == "i" and _is_true(attributes.get("_Unsigned"))
            for name in MISSING:
                self._missing += _values_of(stored, self._numbers(attributes, name))
        self.dtype = self.decode(np.empty(0, stored)).dtype.name

    def decode(self, array: Array) -> Array:
        """Return scaled values, of which missing ones are NaN.

        Raises:
            ValueError: A value is missing, and the dtype has no NaN.
        """
        missing = np.isin(array, self._missing) if self._missing else None
        if self._unsigned:
            array = array.view(f"u{array.dtype.itemsize}")
        if self._scale is not None:
            array = array * self._scale
        if self._offset is not None:
            array = array + self._offset
        return array if missing is None else with_nan(array, missing, self._description)

    def _factor(self, attributes: Mapping[str, Any], name: str) -> Any:
        found = self._numbers(attributes, name)
        if found.size > 1:
            raise self._invalid(name, attributes[name])
        if not found.size:
            return None
        # A fraction in JSON has no dtype, and leaves float32 values float32.
        return attributes[name] if type(attributes[name]) is float else found[0]

    def _numbers(self, attributes: Mapping[str, Any], name: str) -> Array:
        value = attributes.get(name)
        if value is None:
            return np.empty(0)
        try:
            found = np.asarray(_float64(value) if isinstance(value, str) else value).reshape(-1)
        except (TypeError, ValueError, struct.error):
            raise self._invalid(name, value) from None
        if found.dtype.kind not in "biuf":
            raise self._invalid(name, value)
        return found

    def _invalid(self, name: str, value: Any) -> ValueError:
        shown = printable(str(value))[:SHOWN_CHARS]
        return ValueError(
            f"{printable(self._description)}: the attribute {name} is {shown}, which is no number"
        )


def with_nan(values: Array, missing: Array, description: str) -> Array:
    """Return values with NaN where they are missing.

    Raises:
        ValueError: One is missing, and the dtype has no NaN.
    """
    if not missing.any():
        return values
    if values.dtype.kind != "f":
        raise ValueError(
            f"{description} has missing values, and {values.dtype} has no NaN. HINT: use "
            "MODULE:FUNCTION as SOURCE, which replaces them"
        )
    return np.where(missing, values.dtype.type(np.nan), values)


def _float64(text: str) -> float:
    """Return a number that xarray stores as text in zarr version 3: base64 of a double."""
    value: float = struct.unpack("<d", base64.b64decode(text, validate=True))[0]
    return value


def _is_true(value: Any) -> bool:
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text.lower() == "true"


def _values_of(dtype: np.dtype[Any], numbers: Array) -> list[Any]:
    """Return the numbers that can occur in an array, in its dtype."""
    with np.errstate(all="ignore"):
        cast = numbers.astype(dtype)
    if dtype.kind == "f":
        return list(cast[~np.isnan(cast)])
    return [value for value, number in zip(cast, numbers, strict=True) if value == number]
