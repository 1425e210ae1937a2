"""The commands of `octile lab`, one file each. All but `capture` write an HTML page.

A command is a module here with a function `run(options)`, and one with the dataclass `Options`, its command line, in
`octile.lab_options`, which has the table of the commands.

    page.py        shared parts of the commands: tables, sections, the page itself, lists on the command line
    figures.py     shared parts of the figures: colors, legends, heat maps

The figures of larger pages are in NAME_figures.py. A function `draw_…` draws on a figure, and `describe_…` writes its
caption from the data.
"""
