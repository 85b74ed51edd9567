from .document import render as render
from .follow import default_path as default_path
from .follow import follow as follow
from .follow import write_page as write_page
from .run_data import read_run as read_run
