"""What the services share. The only code here is the version; everything else is in the modules."""

__version__ = "0.1.0"
