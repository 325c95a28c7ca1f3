"""The block as other packages compute it, where they are installed: same routing, same weights, same gradients.

    registry   names; which of them are at hand, and why the others are not
    layout     weights in an order of the package's own
    held       outputs and gradients against fp64 before anything is timed
    sonicmoe, scattermoe, fbgemm, liger    one package each: `load` imports it and says how it is run

None of them is needed by anything else here, and each is imported when it is asked for.
"""
