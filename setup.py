"""What pyproject.toml cannot say: `configs/` lies beside the package and ships inside it."""

from pathlib import Path

from setuptools import find_packages, setup

folders = ['violin_timm.configs', *(f'violin_timm.configs.{f.name}' for f in Path('configs').iterdir() if f.is_dir())]

setup(
    packages=[*find_packages(include=['violin_timm', 'violin_timm.*']), *folders],
    package_dir={'violin_timm.configs': 'configs'},
    package_data={folder: ['*.yaml'] for folder in folders},
)
