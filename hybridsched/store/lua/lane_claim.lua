-- Take the first of some lanes that no other has.
--
-- KEYS[1]  lane-holder-fence  integer: raised by every claim of a lane
-- KEYS[2], KEYS[3]  lane-holder:{lane} and gate:{lane} of the first candidate; two more keys for each further one
-- ARGV[1]  owner: a name unique to the process      ARGV[2]  Slurm job of the owner      ARGV[3]  its node
-- ARGV[4]  lease in ms     ARGV[5]  1: only a lane whose gate is open now     ARGV[6..]  the candidates' names
--
-- Returns {index, token}: the candidate that was taken, counted from 0, and what stands in its key; {-1, ''} when
-- none is free. The token carries the fence, so an earlier holder's token never becomes valid again.
--@include clock
for i = 6, #ARGV do
  local at = 2 * (i - 6) + 2
  local free = redis.call('EXISTS', KEYS[at]) == 0
  if free and ARGV[5] == '1' then
    local text = redis.call('GET', KEYS[at + 1])
    local ok, gate = pcall(cjson.decode, text or '')
    free = ok and type(gate) == 'table' and gate.state == 'open'
  end
  if free then
    local token = cjson.encode({
      lane = ARGV[i], owner = ARGV[1], job = ARGV[2], node = ARGV[3],
      fence = redis.call('INCR', KEYS[1]), since_ms = math.floor(clock_ms()),
    })
    redis.call('SET', KEYS[at], token, 'PX', ARGV[4])
    return {i - 6, token}
  end
end
return {-1, ''}
