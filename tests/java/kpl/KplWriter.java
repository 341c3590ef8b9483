/** Amazon's own producer at work: writes records at a steady pace, and prints every acknowledgement. */

import com.google.common.util.concurrent.FutureCallback;
import com.google.common.util.concurrent.Futures;
import com.google.common.util.concurrent.MoreExecutors;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import software.amazon.awssdk.auth.credentials.AwsBasicCredentials;
import software.amazon.awssdk.auth.credentials.StaticCredentialsProvider;
import software.amazon.kinesis.producer.KinesisProducer;
import software.amazon.kinesis.producer.KinesisProducerConfiguration;
import software.amazon.kinesis.producer.UserRecordResult;

public final class KplWriter {
    /** Arguments: the TLS ports of Kinesis and STS, the stream, a folder, how many records, milliseconds for each ten. */
    public static void main(String[] words) throws Exception {
        KinesisProducerConfiguration asked = new KinesisProducerConfiguration()
                .setRegion("eu-west-1").setVerifyCertificate(false).setMetricsLevel("none").setLogLevel("warning")
                .setCredentialsProvider(StaticCredentialsProvider.create(AwsBasicCredentials.create("key", "secret")))
                .setKinesisEndpoint("127.0.0.1").setKinesisPort(Long.parseLong(words[0]))
                .setStsEndpoint("127.0.0.1").setStsPort(Long.parseLong(words[1]))
                .setTempDirectory(words[3]).setRecordMaxBufferedTime(200)
                // A machine with much else to do answers late; no record may expire for it.
                .setConnectTimeout(60_000).setRequestTimeout(60_000).setRecordTtl(300_000);
        KinesisProducer producer = new KinesisProducer(asked);
        for (int at = 0; at < Integer.parseInt(words[4]); at++) {
            String data = "record " + at;
            Futures.addCallback(
                    producer.addUserRecord(words[2], "key-" + at, ByteBuffer.wrap(data.getBytes(StandardCharsets.UTF_8))),
                    new FutureCallback<UserRecordResult>() {
                        @Override
                        public void onSuccess(UserRecordResult put) {
                            System.out.println(put.getShardId() + "," + put.getSequenceNumber() + "," + data);
                        }

                        @Override
                        public void onFailure(Throwable fault) {
                            System.out.println("failed,," + data);
                        }
                    },
                    MoreExecutors.directExecutor());
            if (at % 10 == 9) {
                Thread.sleep(Long.parseLong(words[5]));
            }
        }
        producer.flushSync();
        producer.destroy();
        System.exit(0);
    }
}
