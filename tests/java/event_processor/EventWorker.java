/** Azure's event processor for Java, which tells what it does in the lines of `leasehold consume --events`. */

import com.azure.messaging.eventhubs.EventData;
import com.azure.messaging.eventhubs.EventProcessorClient;
import com.azure.messaging.eventhubs.EventProcessorClientBuilder;
import com.azure.messaging.eventhubs.LoadBalancingStrategy;
import com.azure.messaging.eventhubs.checkpointstore.blob.BlobCheckpointStore;
import com.azure.messaging.eventhubs.models.CloseReason;
import com.azure.messaging.eventhubs.models.EventBatchContext;
import com.azure.messaging.eventhubs.models.EventPosition;
import com.azure.messaging.eventhubs.models.PartitionContext;
import com.azure.storage.blob.BlobContainerAsyncClient;
import com.azure.storage.blob.BlobContainerClientBuilder;
import java.security.MessageDigest;
import java.time.Duration;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;

public final class EventWorker {
    private static String worker;

    /** The latest reader of each partition. The processor may start the next one before it reports the last as closed. */
    private static final Map<String, PartitionContext> LATEST = new ConcurrentHashMap<>();

    /** Arguments: worker, hub, group, container, interval and expiry in seconds; it ends at SIGTERM. */
    public static void main(String[] words) throws Exception {
        worker = words[0];
        EventProcessorClient processor = processor(words[1], words[2], words[3], seconds(words[4]), seconds(words[5]));
        Runtime.getRuntime().addShutdownHook(new Thread(processor::stop));
        processor.start();
        Thread.currentThread().join();
    }

    private static EventProcessorClient processor(
            String hub, String group, String container, Duration interval, Duration expiry) {
        BlobContainerAsyncClient blobs = new BlobContainerClientBuilder()
                .connectionString(System.getenv("AZURE_STORAGE_CONNECTION_STRING"))
                .containerName(container)
                .buildAsyncClient();
        return new EventProcessorClientBuilder()
                .connectionString(System.getenv("EVENTHUBS_CONNECTION_STRING"), hub)
                .consumerGroup(group)
                .checkpointStore(new BlobCheckpointStore(blobs))
                .loadBalancingStrategy(LoadBalancingStrategy.BALANCED)
                .loadBalancingUpdateInterval(interval)
                .partitionOwnershipExpirationInterval(expiry)
                .initialPartitionEventPosition(partition -> EventPosition.earliest())
                .processPartitionInitialization(about -> begin(about.getPartitionContext()))
                .processPartitionClose(about -> end(
                        about.getPartitionContext(),
                        about.getCloseReason() == CloseReason.EVENT_PROCESSOR_SHUTDOWN ? "stopped" : "lease-lost"))
                .processError(about -> System.err.printf(
                        "partition %s: %s%n", about.getPartitionContext().getPartitionId(), about.getThrowable()))
                .processEventBatch(EventWorker::handle, 100, Duration.ofSeconds(1))
                .buildEventProcessorClient();
    }

    private static void begin(PartitionContext about) {
        LATEST.put(about.getPartitionId(), about);
        tell("initialize", about, "");
    }

    private static void end(PartitionContext about, String event) {
        if (LATEST.remove(about.getPartitionId(), about)) {
            tell(event, about, "");
        }
    }

    private static void handle(EventBatchContext batch) {
        List<EventData> events = batch.getEvents();
        for (EventData event : events) {
            String more = ",\"sequence_number\":\"%d\",\"sub_sequence_number\":0,\"partition_key\":null,\"sha1\":\"%s\"";
            String told = more.formatted(event.getSequenceNumber(), sha1(event.getBody()));
            tell("record", batch.getPartitionContext(), told);
        }
        if (!events.isEmpty()) {
            batch.updateCheckpoint();
        }
    }

    private static synchronized void tell(String event, PartitionContext about, String more) {
        String line = "{\"t\":%d,\"worker\":\"%s\",\"event\":\"%s\",\"shard\":\"%s\"%s}\n";
        String told = line.formatted(System.currentTimeMillis(), worker, event, about.getPartitionId(), more);
        System.out.print(told);
        System.out.flush();
    }

    private static String sha1(byte[] body) {
        try {
            return HexFormat.of().formatHex(MessageDigest.getInstance("SHA-1").digest(body));
        } catch (java.security.NoSuchAlgorithmException never) {
            throw new AssertionError(never);
        }
    }

    private static Duration seconds(String text) {
        return Duration.ofMillis(Math.round(1000 * Double.parseDouble(text)));
    }
}
