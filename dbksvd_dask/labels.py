"""Labels of samples and features: what a labelled array brings in, codes and reconstructions carry on.

Dimensions have one name each throughout the package, whatever the input called them: `sample`, `feature`, `atom`
and `slot`.
"""

from __future__ import annotations

from typing import Any

import xarray as xr

# Attribute of codes whose samples came as a labelled array; what is decoded from them is one again.
LABELLED = "labelled"


def label_codes(codes: xr.Dataset, Y: Any) -> xr.Dataset:
    """Give codes the coordinates of the samples of a labelled array, and a note that it was one.

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient` over (`sample`, `slot`)
    Y : the samples they were made of, (n_samples, n_features); anything but a DataArray changes nothing
    """
    if not isinstance(Y, xr.DataArray):
        return codes
    # a coordinate with the name of a variable or dimension of codes would take its place
    coords = _coords_along(Y, 0, "sample").drop_vars(["atom", "coefficient", "slot"], errors="ignore")
    return codes.assign_coords(coords.coords).assign_attrs({LABELLED: True})


def label_samples(Y: Any, codes: xr.Dataset, dictionary: xr.DataArray) -> Any:
    """Give decoded samples the labels of their codes and of the dictionary's features, if they had any.

    Parameters
    ----------
    Y : array of shape (n_samples, n_features)
    codes : Dataset it was decoded from
    dictionary : DataArray of dims (atom, feature)

    Returns
    -------
    DataArray of dims (sample, feature) when the codes are those of a labelled array, else `Y` itself
    """
    if not codes.attrs.get(LABELLED):
        return Y
    of_samples = codes.drop_vars(["atom", "coefficient"]).coords
    out = xr.DataArray(Y, dims=("sample", "feature"), name="reconstruction")
    return out.assign_coords(of_samples).assign_coords(dictionary.coords)


def feature_coords(Y: Any) -> Any:
    """Coordinates of the features of a labelled array, under the name `feature`; none for any other."""
    if not isinstance(Y, xr.DataArray) or Y.ndim != 2:
        return {}
    return _coords_along(Y, 1, "feature").drop_vars("atom", errors="ignore").coords


def _coords_along(Y: xr.DataArray, axis: int, name: str) -> xr.Dataset:
    """Coordinates of a labelled array along one of its two dimensions, which is then called `name`."""
    dim, other = Y.dims[axis], Y.dims[1 - axis]
    coords = Y.coords.to_dataset()
    foreign = [c for c in coords.variables if other in coords[c].dims]
    if axis == 1:  # what belongs to no dimension goes with the samples
        foreign += [c for c in coords.variables if not coords[c].dims]
    coords = coords.drop_vars(foreign)
    if dim == name or dim not in coords.dims:
        return coords
    coords = coords.drop_vars(name, errors="ignore")
    return coords.rename({dim: name}) if dim in coords.variables else coords.rename_dims({dim: name})
