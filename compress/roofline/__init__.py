"""Latency bounds of a model on a device: operations and bytes of every product, after the roofline model.

Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model", 2009; for language models: Yuan
2024, "LLM Inference Unveiled", arXiv 2402.16363, section 2.
"""
