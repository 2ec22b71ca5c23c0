"""Tests for authors of passes: `check_pass(MyPass)` applies the contract that every pass of compress keeps."""

from compress.testing.contract import check_pass as check_pass
