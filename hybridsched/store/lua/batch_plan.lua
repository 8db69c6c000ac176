-- Put the next chunk of a batch into its ledger and move the cursor past it, if nobody else has.
--
-- KEYS[1] batch:{id}  hash     KEYS[2] batch:{id}:chunks  hash chunk number -> JSON
-- ARGV[1] cursor that the caller cut the chunk at (byte offset)
-- ARGV[2] most chunks that may be outstanding (planned and not done)
-- ARGV[3] end  ARGV[4] first_line  ARGV[5] lines  ARGV[6] tokens  ARGV[7] next_line  ARGV[8] 1 at the end of input
--
-- Returns the chunk's number, or -1 the cursor has moved, -2 enough is outstanding, -3 the batch takes no chunks.
--@include clock
local batch = redis.call('HMGET', KEYS[1], 'status', 'stop', 'cursor', 'next_chunk', 'outstanding', 'at_end')
if not batch[1] or (batch[1] ~= 'validating' and batch[1] ~= 'in_progress') or batch[2] ~= '' or batch[6] == '1' then
  return -3
end
if batch[3] ~= ARGV[1] then
  return -1
end
if tonumber(batch[5]) >= tonumber(ARGV[2]) then
  return -2
end
local now = math.floor(clock_ms())
local number = tonumber(batch[4])
redis.call('HSET', KEYS[2], number, cjson.encode({
  start = tonumber(ARGV[1]), ['end'] = tonumber(ARGV[3]), first_line = tonumber(ARGV[4]),
  lines = tonumber(ARGV[5]), tokens = tonumber(ARGV[6]), next_line = tonumber(ARGV[7]),
  at_end = ARGV[8] == '1', state = 'queued', owner = '', lease_ms = 0, fence = 0,
  done = 0, failed = 0, attempts = 0, queued_ms = now,
}))
redis.call('HSET', KEYS[1], 'status', 'in_progress', 'cursor', ARGV[3], 'cursor_line', ARGV[7],
  'next_chunk', number + 1, 'at_end', ARGV[8])
redis.call('HSETNX', KEYS[1], 'started_ms', string.format('%d', now))
redis.call('HINCRBY', KEYS[1], 'outstanding', 1)
return number
