"""Gaps of lamella: by file, a test or a case of a test, and the reason of the failure.

A listed test turns the suite red once the test passes, until the line is removed.
"""

NOT_YET: dict[str, dict[str, str]] = {
    "test_fsdp2_refusals": {
        "test_a_refusal_has_fsdp2s_exception_and_words[a_list_without_a_unit_around_it]": "works here",
        "test_a_refusal_has_fsdp2s_exception_and_words[dp_mesh_dims_on_another_mesh]": "an equal mesh is taken",
        "test_a_refusal_has_fsdp2s_exception_and_words[three_model_axes]": "works here",
        "test_a_refusal_has_fsdp2s_exception_and_words[two_infos_of_one_mesh]": "an equal info is taken",
        "test_a_refusal_has_fsdp2s_exception_and_words[dp_mesh_dims_and_fewer_ranks_after_forward]": "works here",
    },
    "test_fsdp2_placement": {
        "test_after_forward_each_pair_of_ranks_may_hold_the_whole": "keeps its part beside the shards, not in them",
    },
}
