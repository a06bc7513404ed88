"""What pyproject.toml cannot say: `configs/` lies beside the package and ships inside it."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=['violin_timm', 'violin_timm.*']), 'violin_timm.configs'],
    package_dir={'violin_timm.configs': 'configs'},
    package_data={'violin_timm.configs': ['**/*.yaml']},
)
