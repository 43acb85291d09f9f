-- Notifies the processes of waiters.
--
-- With synchronous standbys a message has only the owner: the waiter makes an attempt, whose commit waits for the standby. If the wait of
-- this commit is cancelled, the server sends the notifications although the standby may not have the commit.
--
-- $1 processes   $2 messages
SELECT pg_notify('holdfast_' || c.process,
  CASE WHEN current_setting('synchronous_standby_names') = '' THEN c.message ELSE split_part(c.message, ' ', 1) END
)::text
FROM unnest($1::text[], $2::text[]) AS c(process, message)
