"""The structures of skimkv.h for ctypes. When the library is loaded, every one is compared with what C has."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import CFUNCTYPE, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from typing import Any


def fields(*groups: tuple[str, Any]) -> list[tuple[str, Any]]:
    """The fields of a structure: groups of names, separated by spaces, with their type."""
    return [(name, kind) for names, kind in groups for name in names.split()]


class CChunk(Structure):
    """The memory of some positions of a cache."""

    _fields_ = fields(
        ("start cap", c_int64),
        ("k v index scale", c_void_p),
        ("k_b k_h k_n v_b v_h v_n x_b x_h x_r s_b s_h s_g s_z s_r", c_int64),
        ("means", c_void_p),
        ("e_b e_h e_g", c_int64),
    )


class CCache(Structure):
    """A cache: its sizes, its chunks, and what belongs to all of them."""

    _fields_ = fields(
        ("B H G D R dtype channels n_chunks", c_int32),
        ("chunks lengths tail mean projection", c_void_p),
        ("t_b t_h t_r m_b m_h", c_int64),
        ("bits page n_pages", c_int32),
        ("pages", c_void_p),
    )


class CPaged(Structure):
    """A cache in blocks of a serving engine."""

    _fields_ = fields(
        ("block", CChunk),
        ("bytes blocks", c_int64),
        ("table", c_void_p),
        ("table_b", c_int64),
        ("open", c_void_p),
        ("o_h o_r", c_int64),
        ("mean counts", c_void_p),
        ("m_h n_h", c_int64),
        ("coded", c_void_p),
    )


class COp(Structure):
    """One decode step of attention."""

    _fields_ = fields(
        ("cache q y", c_void_p),
        ("q_b q_h q_g y_b y_h y_g", c_int64),
        ("dtype method", c_int32),
        ("scale softcap", c_float),
        ("r k local", c_int64),
        ("temperature use_mean", c_int32),
        ("k_new v_new", c_void_p),
        ("n_b n_h", c_int64),
        ("keep", c_int32),
        ("slot score pos", c_void_p),
        ("c_b c_h", c_int64),
        ("now recent rows_read sinks paged stage_ns", c_void_p),
    )


class CTokens(Structure):
    """New tokens for a cache."""

    _fields_ = fields(
        ("cache k v", c_void_p),
        ("n k_b k_h k_n v_b v_h v_n", c_int64),
        ("skip at", c_void_p),
    )


class CTurn(Structure):
    """Keys that are turned to other positions."""

    _fields_ = fields(
        ("source to", c_void_p),
        ("f_b f_h f_n t_b t_h t_n", c_int64),
        ("cos sin moves", c_void_p),
        ("B H n D pairs interleaved dtype", c_int32),
    )


class CColumns(Structure):
    """The key scores of a prompt."""

    _fields_ = fields(
        ("H G D dtype parts", c_int32),
        ("scale softcap", c_float),
        ("n m", c_int64),
        ("q k", c_void_p),
        ("q_h q_g q_n k_h k_n", c_int64),
        ("sum sinks", c_void_p),
    )


class CPrompt(Structure):
    """The causal attention of a prompt."""

    _fields_ = fields(
        ("B H G D dtype parts", c_int32),
        ("scale softcap", c_float),
        ("n m", c_int64),
        ("q k v y", c_void_p),
        ("q_b q_h q_g q_n k_b k_h k_n v_b v_h v_n y_b y_h y_g y_n", c_int64),
        ("sinks received", c_void_p),
    )


class CMatrix(Structure):
    """A matrix of weights of any kind (see ops/matrices.py)."""

    _fields_ = fields(("data", c_void_p), ("rows columns", c_int64), ("bias order", c_void_p), ("kind dtype", c_int32))


class CRMSNorm(Structure):
    """A root-mean-square normalisation."""

    _fields_ = fields(("w", c_void_p), ("size", c_int64), ("eps", c_float), ("dtype adds_one", c_int32))


class CNorm(Structure):
    """A root-mean-square normalisation inside an operation of several."""

    _fields_ = fields(("w", c_void_p), ("eps", c_float), ("adds_one", c_int32))


class CLayer(Structure):
    """A layer of a model."""

    _fields_ = fields(
        ("q k v o gate up down", CMatrix), ("before after of_o of_down of_q of_k", CNorm), ("D", c_int64),
        ("activation angles", c_int32),
    )  # fmt: skip


class CLayers(Structure):
    """All layers of a model."""

    _fields_ = fields(("layers", c_void_p), ("count angles", c_int64), ("norm", CNorm))


class CDecoder(Structure):
    """All layers of a model between an embedding and the matrix of its logits."""

    _fields_ = fields(("layers", CLayers), ("embed head", CMatrix))


CAttend = CFUNCTYPE(c_int, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p)  # skimkv_attend


class CField(Structure):
    """Where a field of a structure lies in C; without a field, the size of the whole structure."""

    _fields_ = fields(("structure field", c_char_p), ("offset size", c_int64))


STRUCTURES: dict[str, type[Structure]] = {
    "skimkv_chunk": CChunk, "skimkv_cache": CCache, "skimkv_paged": CPaged, "skimkv_op": COp,
    "skimkv_tokens": CTokens, "skimkv_turn": CTurn, "skimkv_columns": CColumns, "skimkv_prompt": CPrompt,
    "skimkv_matrix": CMatrix, "skimkv_rms_norm": CRMSNorm, "skimkv_norm": CNorm, "skimkv_layer": CLayer,
    "skimkv_layers": CLayers, "skimkv_decoder": CDecoder, "skimkv_field": CField,
}  # fmt: skip


def check_structures(lib: ctypes.CDLL, structures: Mapping[str, type[Structure]] = STRUCTURES) -> None:
    """Raise ValueError, which names the field, unless every structure has the fields, places and sizes that C has."""
    count = c_int64()
    lib.skimkv_fields.restype = ctypes.POINTER(CField)
    rows = lib.skimkv_fields(ctypes.byref(count))
    in_c = {(row.structure, row.field): (row.offset, row.size) for row in rows[: count.value]}
    here: dict[tuple[bytes, bytes | None], tuple[int, int]] = {}
    for name, structure in structures.items():
        here[name.encode(), None] = 0, ctypes.sizeof(structure)
        for field, *_ in structure._fields_:
            place: Any = getattr(structure, field)
            here[name.encode(), field.encode()] = place.offset, place.size
    for key in sorted(in_c.keys() | here.keys(), key=str):
        if in_c.get(key) != here.get(key):
            where = key[0].decode() + ("" if key[1] is None else f".{key[1].decode()}")
            raise ValueError(
                f"{where} has (offset, size) {in_c.get(key)} in C and {here.get(key)} in Python: install again"
            )
