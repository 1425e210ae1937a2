"""The commands of `octile lab`, one file each. All but `capture` write an HTML page.

A command is a module with a dataclass `Options` (the command line) and a function `run(options)`. A new command is one
such module and one entry in `octile.lab.commands`.

    page.py        shared parts of the commands: tables, sections, the page itself, lists on the command line
    figures.py     shared parts of the figures: colors, legends, heat maps

The figures of larger pages are in NAME_figures.py. A function `draw_…` draws on a figure, and `describe_…` writes its
caption from the data.
"""
