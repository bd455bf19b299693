"""Loss with reconstructed activations: SAELens' own evaluation of an exported dictionary beside `dbksvd loss`.

    python -m benchmarks.check_saelens_loss MODEL TEXTS RUN --hook resid:8 --n-tokens 2048

The dictionary is exported, opened with `SAE.load_from_disk` and evaluated by `sae_lens.evals.get_recons_loss` on
the same tokens, window by window, through SAELens' wrapper of Hugging Face models. Compared are the cross-entropy
of the intact model, the cross-entropy with reconstructed activations, and the KL divergence. SAELens leaves the
beginning token alone when it is told to ignore it, as we do; its zero ablation does not, so it is not compared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dbksvd_dask import lm, open_dictionary
from dbksvd_dask.export.saelens import export_saelens
from dbksvd_dask.lm.windows import Windows, make_windows
from dbksvd_dask.store.runs import as_dictionary


def module_name(model: Any, hook: Any) -> str:
    """Name of the module of a hook inside the Hugging Face model."""
    wanted = model.module(model.hook(hook))
    return next(name for name, module in model.model.named_modules() if module is wanted)


def by_saelens(model: Any, windows: Windows, hook: str, folder: Path) -> dict[str, float]:
    """Mean losses per predicted token by SAELens: of an exported folder, on some windows."""
    from sae_lens import SAE
    from sae_lens.evals import get_recons_loss
    from sae_lens.load_model import HookedProxyLM
    from sae_lens.training.activation_scaler import ActivationScaler

    import dbksvd_dask.export.saelens_plugin  # noqa: F401  (registers our class)

    sae = SAE.load_from_disk(str(folder), device="cpu")
    name = module_name(model, hook)
    proxy = HookedProxyLM(model.model, model.tokenizer, [name])
    keys = {"intact": "ce_loss_without_sae", "reconstructed": "ce_loss_with_sae", "kl": "kl_div_with_sae"}
    sums, n = dict.fromkeys(keys, 0.0), 0
    beginning = [int(windows.ids[0])] if windows.skip else None
    for window in range(len(windows.pieces)):
        tokens = torch.from_numpy(windows.tokens(window).astype(np.int64))[None]
        if tokens.shape[1] < 2 + windows.skip:
            continue
        with torch.inference_mode():
            found = get_recons_loss(
                sae, proxy, ActivationScaler(), tokens, True, True, ignore_tokens=beginning, hook_name=name
            )
        counted = slice(windows.skip, tokens.shape[1] - 1)
        n += tokens.shape[1] - 1 - windows.skip
        for ours, theirs in keys.items():
            sums[ours] += float(found[theirs][0, counted].double().sum())
    return {key: value / n for key, value in sums.items()} | {"n_tokens": n}


def compare(
    model: Any, texts: Any, hook: str, run: Any, *, context: int, n_tokens: int, form: str
) -> dict[str, Any]:
    """Losses by both, and their largest difference."""
    given = lm.read_texts(texts) if isinstance(texts, str) else texts
    how = {"context": context, "n_tokens": n_tokens}
    ours = lm.loss_recovered(model, given, hook, {"run": run}, **how)
    one = ours.reconstructions["run"]
    windows = make_windows(model.tokenizer, given.texts, context=context, n_rows=n_tokens)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "sae"
        export_saelens(as_dictionary(run), out, model_name="local", hook_name=hook, form=form)
        theirs = by_saelens(model, windows, hook, out)
    mine = {"intact": ours.intact.value, "reconstructed": one.loss.value, "kl": one.kl.value}
    difference = max(abs(mine[key] - theirs[key]) for key in mine)
    zero = ours.zero.loss.value
    recovered = {
        who: (zero - by["reconstructed"]) / (zero - by["intact"])
        for who, by in (("ours", mine), ("saelens", theirs))
    }
    tokens = {"n_tokens": ours.n_tokens, "n_tokens_saelens": theirs.pop("n_tokens")}
    return {"ours": mine, "saelens": theirs, "recovered": recovered, "largest_difference": difference, **tokens}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.check_saelens_loss",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="Hugging Face model directory")
    parser.add_argument("texts", help="as for dbksvd loss")
    parser.add_argument("run", help="folder of a fit, or a dictionary")
    parser.add_argument("--hook", required=True)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--n-tokens", type=int, default=2048)
    parser.add_argument("--form", default="plugin", choices=("plugin", "builtin"))
    options = parser.parse_args(argv)
    how = {"context": options.context, "n_tokens": options.n_tokens, "form": options.form}
    model = lm.open_model(options.model)
    result = compare(model, options.texts, options.hook, open_dictionary(options.run), **how)
    print(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
