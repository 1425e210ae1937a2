"""Prefill and decoding in processes of their own, on one host.

    router ──(prompt)──▶ prefill process ──(latents in shared memory)──▶ decode process ──(tokens)──▶ router

A long prompt then never delays the tokens of the texts that are being written. The router is the server's process: it
sends each prompt to the prefill process with the fewest tokens to prefill, and then to the decode process with the
fewest tokens in flight. Latents do not pass through the router.

page_pool.py  pages that one process fills and another reads
worker.py     the prefill and the decode process
router.py     `Router`: an engine for the server, whose steps are those of the processes

Source: Zhong et al., DistServe (arXiv 2401.09670); Patel et al., Splitwise (arXiv 2311.18677).
"""
