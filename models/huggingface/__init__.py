"""Hugging Face checkpoint folders, read and written: `config.json` and safetensors.

One table maps tensors to parameters. Tensors are read one at a time into the stacked array of their
parameter, and written one file at a time, so that no second copy of a model is ever in memory.
Pickle files are refused, because reading a pickle can run any program.
"""

from models.huggingface.config import config_of, fields_of
from models.huggingface.files import weight_files
from models.huggingface.loading import check, load, read_config
from models.huggingface.saving import save
from models.huggingface.table import Row, table
from models.parameters import Convert, Put, parameter_of

__all__ = [
    "Convert",
    "Put",
    "Row",
    "check",
    "config_of",
    "fields_of",
    "load",
    "parameter_of",
    "read_config",
    "save",
    "table",
    "weight_files",
]
