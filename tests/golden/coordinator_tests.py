"""TensorFlow's own tests of its coordinator: the records that ask the same, or why none do."""

_PROCESSES = "none: needs processes to kill, and asserts >= where a closure ran twice; "
_DISTRIBUTED = "none: data are for workers here, not for the replicas of another strategy"

OF_TENSORFLOW = {
    # cluster_coordinator_test.py: the queue, which users meet as the coordinator's
    "CoordinatedClosureQueueTest.testBasic": "done_while_running",
    "testProcessAtLeaseOnce": "sum/*",
    "testNotifyBeforeWait": "join_with_nothing",
    "testWaitRaiseErrorAfterMarkFailure": "report/join",
    "testPutRaiseError": "report/schedule",
    "testWaitRaiseError": "cancelled",
    "testDoneRaiseError": "report/done",
    "testWaitRaiseErrorAfterCancelClosure": "cancelled",
    "testPutRaiseErrorAfterCancelClosure": "nothing_queued",
    "testStateIsRestoredAfterJoinIsCalled": "after_an_error",
    "testThreadSafey": "none: of a class of its own; here tests/servers/test_coordinator.py and "
    "the drills run workers against each other",
    "testPutGetWithTag": "none: closures for one worker are private there, and not to be had here",
    # values, functions, arguments
    "testWorkerIndexDatasetFn": "per_worker_context",
    "testClusterCoordinatorOnlyInitOnce": "second_coordinator",
    "testFnReturnNestedValues": "result/*",
    "testFetchingRemoteValueStructure": "fetch_nest",
    "testAsyncScheduleAndJoin": "per_worker_dataset",
    "testDisallowRemoteValueAsInput": "argument/remote*",
    "testPythonFunctionNotAllowedToSchedule": "function/*",
    # data
    "testInputFunction": "iterators_of_one_dataset",
    "testInputFunctionWithMap": "two_datasets_in_a_step",
    "testInputFunctionCreateVariables": "no_dataset/*",
    "testDatasetsShuffledDifferently": "per_worker_context",
    "testDatasetPartiallyCreatedOnCoordinator": "none: there is one process; with Ray a function "
    "takes along what it closes over",
    "testPassDatasetToCreatePerWorkerDataset": "per_worker_dataset",
    "testMultipleDatasets": "two_datasets_in_a_step",
    "testRepeatedIteratorCreation": "iterators_of_one_dataset",
    "testPerWorkerValue, testPerWorkerVariableCreation": "none: by private means there; "
    "PerWorkerValues are in tests/servers/test_coordinator.py, a variable per worker is refused",
    "LimitedClosureQueueSizeBasicTest": "none: a constant of the module there; here "
    "test_a_full_queue_makes_schedule_wait",
    "ScheduleStartDelayTest": "none: an environment variable that nothing here reads",
    # errors
    "testJoinRaiseError": "report/join",
    "testScheduleRaiseError": "report/schedule",
    "testScheduleRaiseErrorWithMultipleFailure": "errors_of_many",
    "testErrorWillbeCleared": "after_an_error",
    "testRemoteValueReturnError": "report/fetch",
    "testInputError": "per_worker_error",
    "testErroredInputNotUsed": "none: data of which nothing is drawn are not made here",
    "testCancellation": "cancelled",
    "testResourceCanStillbeUsedAfterCancellation": "elements_after_an_error",
    # with a strategy
    "testEmbeddingLookup": "none: of the ops in a graph; rows of a table by merges are in "
    "tests/servers/test_cut.py",
    "testRunNotUsedWithClusterCoordinatorSchedule": "run_outside",
    "testBasicVariableAssignment": "docs_example",
    "testRunAndReduce": "in_scope",
    "testRunAndReduceWithAssignAdd": "reduce_in_step",
    "testVariableAggregation": "writes",
    "testVariableCaching": "none: no scope is needed, a step pulls a variable once",
    "testDistributedDatasetInsidePerWorkerDatasetFn": _DISTRIBUTED,
    "testPassDistributedDatasetToCreatePerWorkerDataset": _DISTRIBUTED,
    "testDistributeDatasetsFromFunction": _DISTRIBUTED,
    "testAsyncScheduleWithDistributedDataset": _DISTRIBUTED,
    "testInputFunctionWithMapWithDistributedDataset": _DISTRIBUTED,
    "testPerWorkerDistributeDatasetsElementSpec": _DISTRIBUTED,
    # fault_tolerance_test_base.py
    "testClusterCoordinatorDestroyed": "none: of its threads; here "
    "test_a_dropped_coordinator_ends_its_threads",
    "testWorkerPreemptionBetweenFunctions": _PROCESSES
    + "here test_closures_are_applied_once_whatever_workers_are_lost",
    "testWorkerPreemptionMidstFunction": _PROCESSES + "here the same, and nobody waits",
    "testOneWorkerPreemptionWithCancellation": _PROCESSES + "here the drills of servers",
    "testHandleDatasetCreationFailure*": _PROCESSES
    + "here test_each_element_is_used_once_whatever_workers_are_lost",
    "testWorkerPreemptionErrorType*": "none: of texts of its transport",
    "testPSPreemptionErrorType": "none: of texts of its transport; a lost server is a "
    "ServerLostError, test_a_lost_server_ends_all_and_restore_goes_on_from_the_snapshot",
}
