"""Plugs ``amo_dist`` into torchtitan 0.3.0; importing the package alone is cheap.

``torchtitan_ext.train`` trains from a TOML file, and so does torchtitan's own
``torchtitan.train --module torchtitan_ext --config NAME``.
"""
