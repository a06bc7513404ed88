"""One file per recipe, each a visible loop on timm's components. Import the modules."""
