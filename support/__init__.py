"""What ragen_mini.py needs besides the method. It can be read without these files.

errors.py      mistakes of a user, which are shown in one line, and Ctrl-C
device.py      what depends on the machine: bf16, threads, memory
settings.py    presets and limits of the settings, the command line
loading.py     loading a model
chat.py        its chat template and end tokens, and whether it suits this program
cache.py       reading new tokens with a cache of keys and values
folder.py      the folder of a run: log, save, restore
"""
