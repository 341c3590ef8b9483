import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.List;
import java.util.stream.Collectors;
import software.amazon.kinesis.retrieval.AggregatorUtil;
import software.amazon.kinesis.retrieval.KinesisClientRecord;

/**
 * Takes Kinesis records apart with KCL's own AggregatorUtil, one per line.
 *
 * In: base64 data, first hash key, last hash key, separated by spaces. Out: its user records,
 * separated by spaces, each "aggregated,sub,key,hash key,data" with base64 texts ("-" for none);
 * or "!" and the name of what was thrown.
 */
public class Deaggregate {
    public static void main(String[] arguments) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        PrintStream out = new PrintStream(System.out, false, StandardCharsets.US_ASCII);
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            out.println(answer(line.split(" ", -1)));
        }
        out.flush();
    }

    private static String answer(String[] question) {
        KinesisClientRecord record = KinesisClientRecord.builder()
                .data(ByteBuffer.wrap(Base64.getDecoder().decode(question[0])))
                .partitionKey("outer")
                .sequenceNumber("1")
                .build();
        try {
            return new AggregatorUtil().deaggregate(List.of(record), question[1], question[2]).stream()
                    .map(Deaggregate::said)
                    .collect(Collectors.joining(" "));
        } catch (Throwable thrown) {
            return "!" + thrown.getClass().getName();
        }
    }

    private static String said(KinesisClientRecord user) {
        byte[] data = new byte[user.data().remaining()];
        user.data().get(data);
        return user.aggregated() + "," + user.subSequenceNumber() + "," + base64(user.partitionKey()) + ","
                + base64(user.explicitHashKey()) + "," + Base64.getEncoder().encodeToString(data);
    }

    private static String base64(String text) {
        return text == null ? "-" : Base64.getEncoder().encodeToString(text.getBytes(StandardCharsets.UTF_8));
    }
}
