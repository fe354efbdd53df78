"""Checkpoints of the Hugging Face Hub: found in the local cache, or downloaded into it.

Only configurations, safetensors and the files of tokenizers are downloaded, never a pickle.
`huggingface_hub` decides where the cache is: `HF_HUB_CACHE`, `HF_HOME`, or `~/.cache/huggingface`.
"""

import functools
import pathlib
import re

from models.huggingface.files import INDEX, PICKLES, SINGLE
from models.json_files import read_object

_SMALL = ("config.json", "generation_config.json", "tokenizer*", "vocab.json", "merges.txt",
          "special_tokens_map.json", "added_tokens.json", "*.model", "*.jinja",
          "chat_template.json")  # fmt: skip
_WEIGHTS = ("model*.safetensors", INDEX)
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"


def is_remote(name: str) -> bool:
    """Returns whether a name is a repository of the Hub, and no file or folder of this machine."""
    return is_repository(name) and not pathlib.Path(name).expanduser().exists()


def is_repository(name: str) -> bool:
    """Returns whether a text has the form of a repository, such as "Qwen/Qwen3-0.6B"."""
    return bool(re.fullmatch(f"{_PART}/{_PART}", name)) and not re.search(r"--|\.\.|\.git$", name)


def cached(repository: str) -> pathlib.Path | None:
    """Returns the folder of a repository in the cache, at its main revision; None without one."""
    from huggingface_hub import try_to_load_from_cache  # Takes half a second, and few runs need it.

    config = try_to_load_from_cache(repository, "config.json")
    return pathlib.Path(config).parent if isinstance(config, str) else None


def cache_folder() -> pathlib.Path:
    """Returns the folder of the cache."""
    from huggingface_hub import constants

    return pathlib.Path(constants.HF_HUB_CACHE)


@functools.cache
def download(repository: str, weights: bool = True) -> pathlib.Path:
    """Downloads what the cache lacks of a repository, and returns its folder.

    Asks the Hub once in a process. Without a network, the folder in the cache is taken if there is
    one.

    Args:
      repository: such as "Qwen/Qwen3-0.6B".
      weights: whether to download the weights too.

    Raises:
      OSError: the repository does not exist, is private or gated, or cannot be reached.
    """
    from huggingface_hub import errors, snapshot_download

    wanted = [*_SMALL, *(_WEIGHTS if weights else ())]
    try:
        # Folders in a repository hold other formats, such as onnx.
        return pathlib.Path(
            snapshot_download(repository, allow_patterns=wanted, ignore_patterns=["*/*"])
        )
    except errors.GatedRepoError as error:
        raise OSError(
            f"{repository!r} is gated: accept its terms on https://huggingface.co/{repository},"
            " then log in with `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise OSError(
            f"the Hugging Face Hub has no repository {repository!r}, or it is private: correct the"
            " name, or log in with `hf auth login`."
        ) from error
    except Exception as error:  # The class of an error of the network depends on the version.
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise OSError(
            f"{repository!r} cannot be downloaded: {reason}. Check the network, and start again:"
            " files that are complete are kept."
        ) from error


def missing_file(folder: pathlib.Path, weights: bool = True) -> str | None:
    """Returns a file that a folder in the cache lacks; None if it is complete.

    Args:
      folder: the folder.
      weights: whether the weights must be there.
    """
    needed = ["config.json"]
    if weights and (folder / INDEX).exists():
        files = read_object(folder / INDEX).get("weight_map")
        needed += sorted(set(map(str, files.values()))) if isinstance(files, dict) else []
    elif weights and not any(file.suffix in PICKLES for file in folder.iterdir()):
        needed.append(SINGLE)  # A pickle is refused by the reader, which says why.
    return next((name for name in needed if not (folder / name).exists()), None)
